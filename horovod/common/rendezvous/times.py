"""How long what is waited for."""

# For a step that everyone takes once all have arrived. It takes milliseconds; a stopped process must not be waited for
# for ever.
STEP_SECONDS = 30.0
# By how much one waits longer than another who should give up before, because it knows more about the reason.
GRACE_SECONDS = 2.0
# How long one who has failed waits to hear whether that is the reason that all are given.
VERDICT_SECONDS = 5.0
