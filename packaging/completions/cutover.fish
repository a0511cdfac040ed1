# Print an optspec for argparse to handle cmd's options that are independent of any subcommand.
function __fish_cutover_global_optspecs
    string join \n json h/help V/version
end

function __fish_cutover_needs_command
    # Figure out if the current invocation already has a command.
    set -l cmd (commandline -opc)
    set -e cmd[1]
    argparse -s (__fish_cutover_global_optspecs) -- $cmd 2>/dev/null
    or return
    if set -q argv[1]
        # Also print the command, so this can be used to figure out what it is.
        echo $argv[1]
        return 1
    end
    return 0
end

function __fish_cutover_using_subcommand
    set -l cmd (__fish_cutover_needs_command)
    test -z "$cmd"
    and return 1
    contains -- $cmd[1] $argv
end

complete -c cutover -n "__fish_cutover_needs_command" -l json -d 'Answer in JSON, also on a terminal'
complete -c cutover -n "__fish_cutover_needs_command" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c cutover -n "__fish_cutover_needs_command" -s V -l version -d 'Print version'
complete -c cutover -n "__fish_cutover_needs_command" -f -a "adopt" -d 'Put an existing service under management, without stopping it'
complete -c cutover -n "__fish_cutover_needs_command" -f -a "upgrade" -d 'Move a service to another version: stop, start, prove, or bring the old one back'
complete -c cutover -n "__fish_cutover_needs_command" -f -a "stage" -d 'Verify and seal a release, and change nothing else'
complete -c cutover -n "__fish_cutover_needs_command" -f -a "recover" -d 'Settle an operation that was interrupted'
complete -c cutover -n "__fish_cutover_needs_command" -f -a "resume" -d 'Take up a kept recovery, offline'
complete -c cutover -n "__fish_cutover_needs_command" -f -a "status" -d 'Show the result of the last operation (not the live service: that is `probe`)'
complete -c cutover -n "__fish_cutover_needs_command" -f -a "probe" -d 'Ask the live service what runs, from which release, since when'
complete -c cutover -n "__fish_cutover_needs_command" -f -a "list" -d 'List the services'
complete -c cutover -n "__fish_cutover_needs_command" -f -a "history" -d 'List a service\'s receipts, newest first'
complete -c cutover -n "__fish_cutover_needs_command" -f -a "show" -d 'Show one receipt'
complete -c cutover -n "__fish_cutover_needs_command" -f -a "log" -d 'Show the timeline of an operation, by default the last one'
complete -c cutover -n "__fish_cutover_needs_command" -f -a "verify" -d 'Read every release back and compare it with its seal; check the links'
complete -c cutover -n "__fish_cutover_needs_command" -f -a "version" -d 'Show the version'
complete -c cutover -n "__fish_cutover_needs_command" -f -a "help" -d 'Print this message or the help of the given subcommand(s)'
complete -c cutover -n "__fish_cutover_using_subcommand adopt" -l unit -d 'The unit, as a check against the adapter' -r
complete -c cutover -n "__fish_cutover_using_subcommand adopt" -l version -d 'The version that runs now' -r
complete -c cutover -n "__fish_cutover_using_subcommand adopt" -l from -d 'The directory of the service\'s files, where it is more than its program' -r -F
complete -c cutover -n "__fish_cutover_using_subcommand adopt" -l id -d 'The operation\'s id; a new one by default' -r
complete -c cutover -n "__fish_cutover_using_subcommand adopt" -l take-over -d 'Take over a program that dpkg or rpm owns'
complete -c cutover -n "__fish_cutover_using_subcommand adopt" -l json -d 'Answer in JSON, also on a terminal'
complete -c cutover -n "__fish_cutover_using_subcommand adopt" -s h -l help -d 'Print help'
complete -c cutover -n "__fish_cutover_using_subcommand upgrade" -l id -d 'The operation\'s id; the same id again replays its result' -r
complete -c cutover -n "__fish_cutover_using_subcommand upgrade" -l file -d 'The artifact, instead of the one in the adapter\'s source' -r -F
complete -c cutover -n "__fish_cutover_using_subcommand upgrade" -l consent -d 'Consent, where the adapter requires it'
complete -c cutover -n "__fish_cutover_using_subcommand upgrade" -l allow-downgrade -d 'Allow an older version'
complete -c cutover -n "__fish_cutover_using_subcommand upgrade" -l retry-quarantined -d 'Try bytes again that failed before'
complete -c cutover -n "__fish_cutover_using_subcommand upgrade" -l json -d 'Answer in JSON, also on a terminal'
complete -c cutover -n "__fish_cutover_using_subcommand upgrade" -s h -l help -d 'Print help'
complete -c cutover -n "__fish_cutover_using_subcommand stage" -l file -d 'The artifact, instead of the one in the adapter\'s source' -r -F
complete -c cutover -n "__fish_cutover_using_subcommand stage" -l json -d 'Answer in JSON, also on a terminal'
complete -c cutover -n "__fish_cutover_using_subcommand stage" -s h -l help -d 'Print help'
complete -c cutover -n "__fish_cutover_using_subcommand recover" -l id -d 'The operation; by default the one that is open' -r
complete -c cutover -n "__fish_cutover_using_subcommand recover" -l json -d 'Answer in JSON, also on a terminal'
complete -c cutover -n "__fish_cutover_using_subcommand recover" -s h -l help -d 'Print help'
complete -c cutover -n "__fish_cutover_using_subcommand resume" -l json -d 'Answer in JSON, also on a terminal'
complete -c cutover -n "__fish_cutover_using_subcommand resume" -s h -l help -d 'Print help'
complete -c cutover -n "__fish_cutover_using_subcommand status" -l json -d 'Answer in JSON, also on a terminal'
complete -c cutover -n "__fish_cutover_using_subcommand status" -s h -l help -d 'Print help'
complete -c cutover -n "__fish_cutover_using_subcommand probe" -l json -d 'Answer in JSON, also on a terminal'
complete -c cutover -n "__fish_cutover_using_subcommand probe" -s h -l help -d 'Print help'
complete -c cutover -n "__fish_cutover_using_subcommand list" -l json -d 'Answer in JSON, also on a terminal'
complete -c cutover -n "__fish_cutover_using_subcommand list" -s h -l help -d 'Print help'
complete -c cutover -n "__fish_cutover_using_subcommand history" -l json -d 'Answer in JSON, also on a terminal'
complete -c cutover -n "__fish_cutover_using_subcommand history" -s h -l help -d 'Print help'
complete -c cutover -n "__fish_cutover_using_subcommand show" -l json -d 'Answer in JSON, also on a terminal'
complete -c cutover -n "__fish_cutover_using_subcommand show" -s h -l help -d 'Print help'
complete -c cutover -n "__fish_cutover_using_subcommand log" -l json -d 'Answer in JSON, also on a terminal'
complete -c cutover -n "__fish_cutover_using_subcommand log" -s h -l help -d 'Print help'
complete -c cutover -n "__fish_cutover_using_subcommand verify" -l json -d 'Answer in JSON, also on a terminal'
complete -c cutover -n "__fish_cutover_using_subcommand verify" -s h -l help -d 'Print help'
complete -c cutover -n "__fish_cutover_using_subcommand version" -l json -d 'Answer in JSON, also on a terminal'
complete -c cutover -n "__fish_cutover_using_subcommand version" -s h -l help -d 'Print help'
complete -c cutover -n "__fish_cutover_using_subcommand help; and not __fish_seen_subcommand_from adopt upgrade stage recover resume status probe list history show log verify version help" -f -a "adopt" -d 'Put an existing service under management, without stopping it'
complete -c cutover -n "__fish_cutover_using_subcommand help; and not __fish_seen_subcommand_from adopt upgrade stage recover resume status probe list history show log verify version help" -f -a "upgrade" -d 'Move a service to another version: stop, start, prove, or bring the old one back'
complete -c cutover -n "__fish_cutover_using_subcommand help; and not __fish_seen_subcommand_from adopt upgrade stage recover resume status probe list history show log verify version help" -f -a "stage" -d 'Verify and seal a release, and change nothing else'
complete -c cutover -n "__fish_cutover_using_subcommand help; and not __fish_seen_subcommand_from adopt upgrade stage recover resume status probe list history show log verify version help" -f -a "recover" -d 'Settle an operation that was interrupted'
complete -c cutover -n "__fish_cutover_using_subcommand help; and not __fish_seen_subcommand_from adopt upgrade stage recover resume status probe list history show log verify version help" -f -a "resume" -d 'Take up a kept recovery, offline'
complete -c cutover -n "__fish_cutover_using_subcommand help; and not __fish_seen_subcommand_from adopt upgrade stage recover resume status probe list history show log verify version help" -f -a "status" -d 'Show the result of the last operation (not the live service: that is `probe`)'
complete -c cutover -n "__fish_cutover_using_subcommand help; and not __fish_seen_subcommand_from adopt upgrade stage recover resume status probe list history show log verify version help" -f -a "probe" -d 'Ask the live service what runs, from which release, since when'
complete -c cutover -n "__fish_cutover_using_subcommand help; and not __fish_seen_subcommand_from adopt upgrade stage recover resume status probe list history show log verify version help" -f -a "list" -d 'List the services'
complete -c cutover -n "__fish_cutover_using_subcommand help; and not __fish_seen_subcommand_from adopt upgrade stage recover resume status probe list history show log verify version help" -f -a "history" -d 'List a service\'s receipts, newest first'
complete -c cutover -n "__fish_cutover_using_subcommand help; and not __fish_seen_subcommand_from adopt upgrade stage recover resume status probe list history show log verify version help" -f -a "show" -d 'Show one receipt'
complete -c cutover -n "__fish_cutover_using_subcommand help; and not __fish_seen_subcommand_from adopt upgrade stage recover resume status probe list history show log verify version help" -f -a "log" -d 'Show the timeline of an operation, by default the last one'
complete -c cutover -n "__fish_cutover_using_subcommand help; and not __fish_seen_subcommand_from adopt upgrade stage recover resume status probe list history show log verify version help" -f -a "verify" -d 'Read every release back and compare it with its seal; check the links'
complete -c cutover -n "__fish_cutover_using_subcommand help; and not __fish_seen_subcommand_from adopt upgrade stage recover resume status probe list history show log verify version help" -f -a "version" -d 'Show the version'
complete -c cutover -n "__fish_cutover_using_subcommand help; and not __fish_seen_subcommand_from adopt upgrade stage recover resume status probe list history show log verify version help" -f -a "help" -d 'Print this message or the help of the given subcommand(s)'
