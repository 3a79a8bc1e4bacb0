"""One pool of isolated processes for code of users and models. Their owner checks all that they send and unpickles none of it."""
