"""A leaf: what marks the errors that explain themselves."""


class ExplainedError(Exception):
    """An error whose message says what happened and what to do, so that it is shown without the driver's traceback.

    Where it has a cause, as a user's reward function that raised, the cause's traceback is shown.
    """
