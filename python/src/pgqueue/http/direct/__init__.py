"""Direct routes: the verbs of a queue, each in one round trip."""
