"""A contract double: the functions of LightLLM that the adapter touches, their names, signatures and order of calls.

Written for these tests, in torch, without the engine's scheduling, memory or kernels. The same tests run against a
real checkout with LIGHTLLM_SRC.
"""
