// A collective as a resumable task: a coroutine that never blocks. It suspends until a peer's flag has grown enough;
// the executor looks at that flag and resumes it, from whichever thread drives at that moment.
#ifndef HOROVOD_COLLECTIVES_TASK_H_
#define HOROVOD_COLLECTIVES_TASK_H_

#include <coroutine>
#include <exception>
#include <utility>

#include "transport/segment.h"

namespace hvd {

// What a suspended task waits for.
struct Wait {
  const Flag* flag = nullptr;  // null: nothing, only letting others go first
  uint64_t at_least = 0;
  int peer = -1;           // rank that will raise the flag
  uint64_t interests = 0;  // see transport/doorbell.h

  bool satisfied() const { return flag == nullptr || flag->load() >= at_least; }
};

// Thrown into a task whose peer will never raise the flag.
struct PeerGone : std::exception {
  explicit PeerGone(int rank) : peer(rank) {}
  const char* what() const noexcept override { return "a peer is gone"; }
  int peer;
};

class Task {
 public:
  struct promise_type {
    Task get_return_object() { return Task(std::coroutine_handle<promise_type>::from_promise(*this)); }
    std::suspend_always initial_suspend() noexcept { return {}; }
    std::suspend_always final_suspend() noexcept { return {}; }
    void return_void() {}
    void unhandled_exception() { error = std::current_exception(); }

    Wait wait;
    bool give_up = false;
    std::exception_ptr error;
  };

  Task() = default;
  Task(Task&& other) noexcept : handle_(std::exchange(other.handle_, {})) {}
  Task& operator=(Task&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Task() {
    if (handle_) handle_.destroy();
  }

  bool done() const { return handle_.done(); }
  const Wait& wait() const { return handle_.promise().wait; }
  void resume() {
    handle_.promise().wait = {};
    handle_.resume();
  }
  // Resumes with PeerGone at the point where the task waits.
  void give_up() {
    handle_.promise().give_up = true;
    handle_.resume();
  }
  std::exception_ptr error() const { return handle_.promise().error; }

 private:
  explicit Task(std::coroutine_handle<promise_type> handle) : handle_(handle) {}
  std::coroutine_handle<promise_type> handle_;
};

// co_await Until{...}: goes on at once if the wait is satisfied.
struct Until {
  Wait wait;
  Task::promise_type* promise = nullptr;

  bool await_ready() const { return wait.satisfied(); }
  void await_suspend(std::coroutine_handle<Task::promise_type> handle) {
    promise = &handle.promise();
    promise->wait = wait;
  }
  void await_resume() const {
    if (promise != nullptr && promise->give_up) throw PeerGone(wait.peer);
  }
};

// co_await LetOthers{}: suspends once, so that agreement and other sets go on while a long batch moves.
using LetOthers = std::suspend_always;

}  // namespace hvd
#endif  // HOROVOD_COLLECTIVES_TASK_H_
