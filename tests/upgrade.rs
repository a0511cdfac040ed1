//! Upgrades of a real unit on a real systemd: the good ones, and each way in which a candidate is bad.

mod machine;

use machine::{Demo, Machine};

#[test]
fn a_first_upgrade_from_nothing_is_promoted_and_a_second_replaces_it() {
    let m = Machine::shared();
    let demo = Demo::new(&m, "good").genesis().install();
    demo.release("1.0", &[]);
    demo.release("2.0", &[]);
    demo.upgrade("1.0", &[]).expect(0, "promoted");
    demo.assert_settled("1.0");
    let answer = demo.upgrade("2.0", &["--id", "second"]).expect(0, "promoted");
    demo.assert_settled("2.0");
    assert_eq!(answer.receipt("fromVersion"), "1.0");
}
