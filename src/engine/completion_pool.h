// Runs the callbacks of ended operations, on threads of its own.
//
// A callback may block for long (TensorFlow and XLA run the rest of the program inside it), even until another callback
// of this pool has run. So there is always a spare thread: while callbacks return quickly one thread runs them all;
// when the queue has not moved for kPatience the spare takes the next one and becomes a worker, and a new spare is
// started.
#ifndef HOROVOD_ENGINE_COMPLETION_POOL_H_
#define HOROVOD_ENGINE_COMPLETION_POOL_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace hvd {

class CompletionPool {
 public:
  static constexpr std::chrono::milliseconds kPatience{1};

  CompletionPool();
  // Runs what is queued, then ends the threads. May be called from a callback.
  ~CompletionPool();
  CompletionPool(const CompletionPool&) = delete;
  CompletionPool& operator=(const CompletionPool&) = delete;

  void run(std::function<void()> callback);
  size_t threads() const;

 private:
  // Shared with the threads, because one of them may outlive the pool: the one whose callback destroys it.
  struct State {
    std::mutex mutex;
    std::condition_variable wake;
    std::deque<std::function<void()>> queue;
    std::vector<std::thread> threads;
    uint64_t taken = 0;  // callbacks ever taken from the queue
    size_t busy = 0, spare = 0;
    bool closing = false;
  };
  static void work(const std::shared_ptr<State>& state);

  std::shared_ptr<State> state_;
};

}  // namespace hvd
#endif  // HOROVOD_ENGINE_COMPLETION_POOL_H_
