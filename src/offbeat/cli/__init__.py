"""The ``offbeat`` command: one file per verb. Heavy imports happen inside the verb that needs them."""
