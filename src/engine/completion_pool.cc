#include "engine/completion_pool.h"

#include <pthread.h>

namespace hvd {

CompletionPool::CompletionPool() : state_(std::make_shared<State>()) {}

CompletionPool::~CompletionPool() {
  std::vector<std::thread> threads;
  {
    const std::lock_guard lock(state_->mutex);
    state_->closing = true;
    threads.swap(state_->threads);
  }
  state_->wake.notify_all();
  for (std::thread& thread : threads) {
    if (thread.get_id() == std::this_thread::get_id()) {
      thread.detach();
    } else {
      thread.join();
    }
  }
}

void CompletionPool::run(std::function<void()> callback) {
  const std::lock_guard lock(state_->mutex);
  state_->queue.push_back(std::move(callback));
  if (state_->threads.empty()) state_->threads.emplace_back(work, state_);
  state_->wake.notify_one();
}

size_t CompletionPool::threads() const {
  const std::lock_guard lock(state_->mutex);
  return state_->threads.size();
}

void CompletionPool::work(const std::shared_ptr<State>& state) {
  pthread_setname_np(pthread_self(), "hvd-callbacks");
  std::unique_lock lock(state->mutex);
  for (;;) {
    ++state->spare;
    state->wake.wait(lock, [&] { return !state->queue.empty() || state->closing; });
    if (state->busy > 0 && !state->closing) {
      const uint64_t taken = state->taken;
      const bool moves = state->wake.wait_for(lock, kPatience, [&] { return state->taken != taken || state->closing; });
      if (moves && !state->closing) {
        --state->spare;
        continue;
      }
    }
    --state->spare;
    if (state->queue.empty()) {
      if (state->closing) return;
      continue;
    }
    ++state->busy;
    while (!state->queue.empty()) {
      const std::function<void()> callback = std::move(state->queue.front());
      state->queue.pop_front();
      ++state->taken;
      if (state->spare == 0 && !state->closing) {
        state->threads.emplace_back(work, state);
      } else {
        state->wake.notify_one();  // the spare's patience begins
      }
      lock.unlock();
      callback();
      lock.lock();
    }
    --state->busy;
  }
}

}  // namespace hvd
