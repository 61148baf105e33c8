"""The run folder and the life of a run in it: layout, lease, stop signals, heartbeats, watchdog.

An attempt is one start of a run. Its states, and the ends of each (exit codes of
`pretrain.errors`):

    started --> leased --> connected --> loaded --> stepping --> last step saved --> done [0]
       ^                                    ^          |
       |                                    +----------+ rollback after a loss spike, same process
       |                                               |
       +--- next attempt, behind the last commit ------+ interrupted

    started       bad config [64] or data [65]; run folder of a live attempt [73]
    leased        a rank does not come up, or has other versions [69]
    connected     committed checkpoints, none of them valid [66]
    any of these  stop signal: immediate exit [75]
    stepping      interrupted: stop signal, saves first [75]; second signal [128 + n]; hang, by the watchdog [76];
                  SIGKILL or power loss, after which the lease expires, or its process is found dead
    stepping      for the user to fix: bad numbers [77], full disk [74], bug [70]
"""
