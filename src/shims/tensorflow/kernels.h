// The kernels of our TensorFlow operations: they hand tensors to the engine and are done when it is.
#ifndef HOROVOD_SHIMS_TENSORFLOW_KERNELS_H_
#define HOROVOD_SHIMS_TENSORFLOW_KERNELS_H_

#include "shims/tensorflow/api.h"

namespace hvd::tensorflow {

// For TF_NewAsyncKernelBuilder: a function that makes the kernel of each collective, one that runs and one that deletes
// any of them.
using Create = void* (*)(TF_OpKernelConstruction*);
extern const Create create_allreduce, create_allgather, create_broadcast, create_alltoall, create_reducescatter,
    create_join;
void run_collective(void* kernel, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done);
void delete_collective(void* kernel);

// For TF_NewKernelBuilder: rank and size at the time when the operation runs.
void* create_place(TF_OpKernelConstruction* construction);
void run_place(void* kernel, TF_OpKernelContext* context);
void delete_place(void* kernel);

}  // namespace hvd::tensorflow
#endif  // HOROVOD_SHIMS_TENSORFLOW_KERNELS_H_
