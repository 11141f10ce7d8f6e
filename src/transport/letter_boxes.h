// What comes over a link beside its lanes: *letters*, whole small payloads, each for a numbered *box*.
//
// A lane's bytes have their place because both ends run the same batches in the same order. A letter needs no such
// order: whoever expects letters opens a box for them, and its number is all that both ends have to agree on (see
// engine/standing_orders.h). Boxes are opened in ascending order, before the other end can send a letter for them; what
// comes for one that was closed is dropped.
//
// Used by the driver alone.
#ifndef HOROVOD_TRANSPORT_LETTER_BOXES_H_
#define HOROVOD_TRANSPORT_LETTER_BOXES_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>

#include "transport/segment.h"

namespace hvd {

struct Letter {
  std::unique_ptr<std::byte[]> data;
  size_t bytes = 0, room = 0;
};

class LetterBoxes {
 public:
  static constexpr size_t kMostBytes = 512 << 10;  // of a letter
  // How many letters of one sender may wait in a box: who writes the next one has read our last one.
  static constexpr size_t kMostWaiting = 2;

  void open(uint64_t box);
  void close(uint64_t box) { boxes_.erase(box); }
  // How many letters have come since the box was opened.
  const Flag& arrived(uint64_t box) const { return boxes_.at(box).arrived; }
  // The oldest of them, of which there must be one.
  Letter take(uint64_t box);
  // Memory for a letter that is about to come.
  Letter blank(size_t bytes);
  // Gives memory back to be used again: new pages would cost more than what is written on them.
  void reuse(Letter letter);
  // Throws BadFrame if no sender of this version would send that.
  void deliver(uint64_t box, Letter letter);

 private:
  struct Box {
    std::deque<Letter> letters;
    Flag arrived{0};
  };
  std::map<uint64_t, Box> boxes_;
  uint64_t newest_ = 0;
  Letter spare_;
};

}  // namespace hvd
#endif  // HOROVOD_TRANSPORT_LETTER_BOXES_H_
