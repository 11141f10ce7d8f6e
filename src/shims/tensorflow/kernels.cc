// A kernel run is a Call: it submits its tensors to the engine, all at once, and returns without waiting. It ends when
// all of them have ended, on whichever thread that happens; TensorFlow then goes on from there.
//
//   open       counts the tensors that have not ended, plus one for the thread that submits them: so nobody ends a Call
//              before it is complete, and the handle of each tensor is known when it does
//   done       TensorFlow's function to be called at the end. It lies on the stack of the caller of run_collective as a
//              std::function, to which the C interface hands out a pointer: it is copied. (That this copy works was
//              tried with all versions; the C interface has no other way to keep it.)
//
// The engine's threads call allocate_rows and ended. What TensorFlow's context is asked for is asked for with the mutex
// held: a context is not made for several threads.
#include "shims/tensorflow/kernels.h"

#include <atomic>
#include <bit>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <vector>

#include "api/horovod.h"
#include "shims/tensorflow/status.h"

namespace hvd::tensorflow {
namespace {

struct TensorDeleter {
  void operator()(TF_Tensor* tensor) const { api().DeleteTensor(tensor); }
};
using Tensor = std::unique_ptr<TF_Tensor, TensorDeleter>;

hvd_dtype dtype_of(DataType type) {
  switch (type) {
    case kUint8:
      return HVD_UINT8;
    case kInt8:
      return HVD_INT8;
    case kUint16:
      return HVD_UINT16;
    case kInt16:
      return HVD_INT16;
    case kInt32:
      return HVD_INT32;
    case kInt64:
      return HVD_INT64;
    case kHalf:
      return HVD_FLOAT16;
    case kFloat:
      return HVD_FLOAT32;
    case kDouble:
      return HVD_FLOAT64;
    case kBool:
      return HVD_BOOL;
    case kBfloat16:
      return HVD_BFLOAT16;
    case kUint32:
      return HVD_UINT32;
    case kUint64:
      return HVD_UINT64;
    case kComplex64:
      return HVD_COMPLEX64;
    case kComplex128:
      return HVD_COMPLEX128;
    case kFloat8E4m3fn:
      return HVD_FLOAT8_E4M3FN;
    case kFloat8E5m2:
      return HVD_FLOAT8_E5M2;
  }
  throw Failure(kInvalidArgument, "tensors of TensorFlow's data type " + std::to_string(type) + " are not supported");
}

std::vector<int64_t> shape_of(const Tensor& tensor) {
  std::vector<int64_t> shape(static_cast<size_t>(api().NumDims(tensor.get())));
  for (size_t i = 0; i < shape.size(); ++i) shape[i] = api().Dim(tensor.get(), static_cast<int>(i));
  return shape;
}

Tensor input_of(TF_OpKernelContext* context, int index) {
  TF_Tensor* tensor = nullptr;
  const Status status;
  api().GetInput(context, index, &tensor, status);
  status.check();
  return Tensor(tensor);
}

Tensor allocate(TF_OpKernelContext* context, int index, DataType type, const std::vector<int64_t>& shape) {
  const auto elements = static_cast<size_t>(
      std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>()));  // TensorFlow checks for overflow
  const Status status;
  Tensor tensor(api().AllocateOutput(context, index, type, shape.data(), static_cast<int>(shape.size()),
                                     elements * api().DataTypeSize(type), status));
  status.check();
  return tensor;
}

// A new tensor of the input's shape, or the input's own memory if nobody else needs what is in it.
Tensor forward_or_allocate(TF_OpKernelContext* context, int index, const std::vector<int64_t>& shape) {
  const Status status;
  int forwarded = -1;
  Tensor tensor(api().ForwardInputOrAllocateOutput(context, &index, 1, index, shape.data(),
                                                   static_cast<int>(shape.size()), &forwarded, status));
  status.check();
  return tensor;
}

// ---- Kernels
// ---------------------------------------------------------------------------------------------------------

// What the attributes of a node say.
struct Kernel {
  hvd_op op;
  std::string name;
  hvd_reduce_op reduce_op = HVD_SUM;
  int32_t root = 0, process_set = 0;
  double prescale = 1, postscale = 1;

  bool moves_rows() const { return op == HVD_ALLGATHER || op == HVD_ALLTOALL; }
  int tensors_of(TF_OpKernelContext* context) const {
    if (op == HVD_JOIN) return 0;
    return op == HVD_ALLTOALL ? 1 : api().NumInputs(context);  // the other input of an alltoall is its splits
  }
  // The names of a group are those of all bindings.
  std::string name_of(int index, int count) const {
    return count == 1 ? name : name + "_" + std::to_string(index + 1) + "of" + std::to_string(count);
  }
};

int64_t int_attribute(TF_OpKernelConstruction* construction, const char* name) {
  int64_t value = 0;
  const Status status;
  api().OpKernelConstruction_GetAttrInt64(construction, name, &value, status);
  status.check();
  return value;
}

std::string string_attribute(TF_OpKernelConstruction* construction, const char* name) {
  int32_t list_size = 0, size = 0;
  const Status status;
  api().OpKernelConstruction_GetAttrSize(construction, name, &list_size, &size, status);
  status.check();
  std::string value(static_cast<size_t>(size), '\0');
  api().OpKernelConstruction_GetAttrString(construction, name, value.data(), value.size(), status);
  status.check();
  return value;
}

template <hvd_op op>
void* create(TF_OpKernelConstruction* construction) {
  try {
    auto kernel = std::make_unique<Kernel>();
    kernel->op = op;
    if constexpr (op != HVD_JOIN) {
      kernel->name = string_attribute(construction, "tensor_name");
      kernel->process_set = static_cast<int32_t>(int_attribute(construction, "process_set"));
    }
    if constexpr (op == HVD_BROADCAST) kernel->root = static_cast<int32_t>(int_attribute(construction, "root_rank"));
    if constexpr (op == HVD_ALLREDUCE || op == HVD_REDUCESCATTER) {
      kernel->reduce_op = static_cast<hvd_reduce_op>(int_attribute(construction, "reduce_op"));
      // TensorFlow's attributes have no double.
      kernel->prescale = std::bit_cast<double>(int_attribute(construction, "prescale_bits"));
      kernel->postscale = std::bit_cast<double>(int_attribute(construction, "postscale_bits"));
    }
    return kernel.release();
  } catch (const Failure& failure) {
    api().OpKernelConstruction_Failure(construction, Status(failure.code, failure.what()));
    return nullptr;
  }
}

hvd_place place_in(int32_t process_set) {
  hvd_place place{};
  place.struct_size = sizeof place;
  const hvd_status status = hvd_get_place(process_set, &place);
  if (status != HVD_OK) throw Failure(code_of(status), hvd_last_error());
  return place;
}

// ---- Calls
// -----------------------------------------------------------------------------------------------------------

class Call;

// One tensor of a call.
struct Member {
  Call* call = nullptr;
  int index = 0;
  DataType type = kFloat;
  Tensor input, output;
  hvd_handle handle = 0;
};

class Call {
 public:
  Call(const Kernel& kernel, TF_OpKernelContext* context, std::function<void()> done)
      : kernel_(kernel), context_(context), done_(std::move(done)) {}

  void run() {
    const int count = kernel_.tensors_of(context_);
    const size_t operations = kernel_.op == HVD_JOIN ? 1 : static_cast<size_t>(count);
    members_ = std::vector<Member>(operations);
    open_ = operations + 1;
    for (size_t i = 0; i < operations; ++i) {
      members_[i].call = this;
      members_[i].index = static_cast<int>(i);
      try {
        submit(members_[i], kernel_.name_of(static_cast<int>(i), count));
      } catch (const Failure& failure) {
        fail(failure.code, failure.what());
        close_one();
      }
    }
    close_one();
  }

 private:
  void submit(Member& member, const std::string& name) {
    hvd_request request{};
    request.struct_size = sizeof request;
    request.op = kernel_.op;
    request.name = name.data();
    request.name_length = name.size();
    request.reduce_op = kernel_.reduce_op;
    request.root = kernel_.root;
    request.process_set = kernel_.process_set;
    request.prescale = kernel_.prescale;
    request.postscale = kernel_.postscale;
    request.callback = ended;
    request.context = &member;
    std::vector<int64_t> shape, splits;
    if (kernel_.op != HVD_JOIN) {
      const std::lock_guard lock(mutex_);
      prepare(member, shape, splits);
      request.dtype = dtype_of(member.type);
      request.input = api().TensorData(member.input.get());
      request.output = member.output ? api().TensorData(member.output.get()) : nullptr;
    }
    if (kernel_.moves_rows()) request.allocate = allocate_rows;
    request.ndim = static_cast<int32_t>(shape.size());
    request.shape = shape.data();
    request.splits = splits.data();
    request.n_splits = static_cast<int32_t>(splits.size());
    const hvd_status status = hvd_submit(&request, &member.handle);
    if (status != HVD_OK) throw Failure(code_of(status), hvd_last_error());
  }

  // Input and output, with the mutex held.
  void prepare(Member& member, std::vector<int64_t>& shape, std::vector<int64_t>& splits) {
    member.input = input_of(context_, member.index);
    shape = shape_of(member.input);
    member.type = api().TensorType(member.input.get());
    if (kernel_.op == HVD_ALLREDUCE || kernel_.op == HVD_BROADCAST) {
      member.input.reset();  // the memory is forwarded only if nobody else holds it
      member.output = forward_or_allocate(context_, member.index, shape);
      // Its own output, if that was forwarded.
      member.input = input_of(context_, member.index);
    } else if (kernel_.op == HVD_REDUCESCATTER) {
      std::vector<int64_t> own = shape;
      if (!own.empty()) own[0] = own_share(own[0]);  // a scalar is the engine's to refuse
      member.output = allocate(context_, member.index, member.type, own);
    } else if (kernel_.op == HVD_ALLTOALL) {
      const Tensor counts = input_of(context_, 1);
      const std::vector<int64_t> extents = shape_of(counts);
      if (extents.size() != 1) throw Failure(kInvalidArgument, "alltoall: splits must have one dimension");
      const auto* first = static_cast<const int32_t*>(api().TensorData(counts.get()));
      splits.assign(first, first + extents[0]);
    }
  }

  // Of n rows the r-th of s ranks gets n / s, and one more if r < n % s.
  int64_t own_share(int64_t rows) const {
    const hvd_place place = place_in(kernel_.process_set);
    if (place.set_rank < 0) return rows;  // no member: the engine will refuse it
    return rows / place.set_size + (place.set_rank < rows % place.set_size ? 1 : 0);
  }

  static void* allocate_rows(void* context, int32_t ndim, const int64_t* shape) {
    Member& member = *static_cast<Member*>(context);
    static char nothing;
    try {
      const std::lock_guard lock(member.call->mutex_);
      member.output = allocate(member.call->context_, member.index, member.type, {shape, shape + ndim});
      void* const data = api().TensorData(member.output.get());
      return data == nullptr && api().TensorByteSize(member.output.get()) == 0 ? &nothing : data;
    } catch (const Failure& failure) {
      member.call->fail(failure.code, failure.what());
      return nullptr;
    }
  }

  static void ended(void* context, hvd_status status, const char* message) {
    Member& member = *static_cast<Member*>(context);
    if (status != HVD_OK) member.call->fail(code_of(status), message);
    member.call->close_one();
  }

  void fail(Code code, const std::string& text) {
    const std::lock_guard lock(failure_mutex_);
    if (!failure_) failure_ = std::make_unique<Failure>(code, text);
  }

  // Deletes this if it was the last one.
  void close_one() {
    if (open_.fetch_sub(1) != 1) return;
    try {
      if (!failure_) give_counts();
    } catch (const Failure& failure) {
      fail(failure.code, failure.what());
    }
    for (const Member& member : members_) {
      if (member.handle != 0) hvd_release(member.handle);
    }
    if (failure_) api().OpKernelContext_Failure(context_, Status(failure_->code, failure_->what()));
    const std::function<void()> done = std::move(done_);
    delete this;
    done();
  }

  // The outputs besides the tensors: which rank joined last, or how many rows came from each.
  void give_counts() {
    if (kernel_.op != HVD_JOIN && !kernel_.moves_rows()) return;
    for (const Member& member : members_) {
      hvd_result result{};
      result.struct_size = sizeof result;
      const hvd_status status = hvd_take_result(member.handle, &result);
      if (status != HVD_OK) throw Failure(code_of(status), hvd_last_error());
      if (kernel_.op == HVD_JOIN) {
        give(0, {}, &result.value);
      } else {
        const std::vector<int32_t> received(result.received, result.received + result.n_received);
        give(static_cast<int>(members_.size()) + member.index, {result.n_received}, received.data());
      }
    }
  }

  void give(int output, const std::vector<int64_t>& shape, const int32_t* numbers) {
    const Tensor tensor = allocate(context_, output, kInt32, shape);
    const size_t count = api().TensorByteSize(tensor.get()) / sizeof *numbers;
    std::copy(numbers, numbers + count, static_cast<int32_t*>(api().TensorData(tensor.get())));
  }

  const Kernel& kernel_;  // TensorFlow keeps it until the call has ended
  TF_OpKernelContext* const context_;
  std::function<void()> done_;
  std::vector<Member> members_;
  std::atomic<size_t> open_{0};
  std::mutex mutex_;  // guards context_ and the members' tensors
  std::mutex failure_mutex_;
  std::unique_ptr<Failure> failure_;  // the first one
};

}  // namespace

const Create create_allreduce = create<HVD_ALLREDUCE>;
const Create create_allgather = create<HVD_ALLGATHER>;
const Create create_broadcast = create<HVD_BROADCAST>;
const Create create_alltoall = create<HVD_ALLTOALL>;
const Create create_reducescatter = create<HVD_REDUCESCATTER>;
const Create create_join = create<HVD_JOIN>;

void run_collective(void* kernel, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done) {
  const auto& function = *reinterpret_cast<const std::function<void()>*>(done);
  (new Call(*static_cast<const Kernel*>(kernel), context, function))->run();
}

void delete_collective(void* kernel) { delete static_cast<Kernel*>(kernel); }

// ---- Rank and size
// ---------------------------------------------------------------------------------------------------

void* create_place(TF_OpKernelConstruction* construction) {
  try {
    return new auto(static_cast<int32_t>(int_attribute(construction, "process_set")));
  } catch (const Failure& failure) {
    api().OpKernelConstruction_Failure(construction, Status(failure.code, failure.what()));
    return nullptr;
  }
}

void run_place(void* kernel, TF_OpKernelContext* context) {
  try {
    const hvd_place place = place_in(*static_cast<const int32_t*>(kernel));
    const int32_t included = place.set_rank < 0 ? 0 : 1;
    const int32_t outputs[] = {place.rank, place.local_rank, place.set_size, place.local_size, included};
    for (int i = 0; i < 5; ++i) {
      const Tensor tensor = allocate(context, i, kInt32, {});
      *static_cast<int32_t*>(api().TensorData(tensor.get())) = outputs[i];
    }
  } catch (const Failure& failure) {
    api().OpKernelContext_Failure(context, Status(failure.code, failure.what()));
  }
}

void delete_place(void* kernel) { delete static_cast<int32_t*>(kernel); }

}  // namespace hvd::tensorflow
