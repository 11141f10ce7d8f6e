"""What is told to users whose Keras runs on another framework than the one they have asked Horovod for."""


def other_backend(what: str, backend: str, needed: str, choices: str) -> str:
    """The text of the error.

    Args:
        what: The function or module that was used.
        backend: What Keras runs on.
        needed: What it would have to run on.
        choices: Values of KERAS_BACKEND for that.
    """
    advice = " With PyTorch use horovod.keras: import horovod.keras as hvd." if backend == "torch" else ""
    return (
        f"{what}: Keras runs on {backend}, and this needs {needed}.{advice} Otherwise set KERAS_BACKEND to {choices} "
        "before Keras is imported."
    )
