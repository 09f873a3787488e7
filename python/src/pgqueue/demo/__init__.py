"""The demo: flights go through a queue, with a crash on the way, and the books have to balance."""
