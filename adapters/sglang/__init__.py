"""SGLang runtime adapter: DSPARK requests accept by an acceptance policy, through the engine's own plugin mechanism.

`plugin.register` is the entry point of the group `sglang.srt.plugins`; nothing here imports the engine before it runs.
"""
