from hypothesis import settings

# No deadline: a slow machine is no failure.
settings.register_profile("rlx", deadline=None)
settings.load_profile("rlx")
