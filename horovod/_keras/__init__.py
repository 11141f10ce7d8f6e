"""What horovod.keras and horovod.tensorflow.keras share, for Keras 3 and for Keras 2 (tf-keras)."""
