"""The two models: pure functions of ids, positions and a sequence memory."""
