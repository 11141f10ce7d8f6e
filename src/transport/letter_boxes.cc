#include "transport/letter_boxes.h"

#include <algorithm>
#include <string>
#include <utility>

#include "transport/errors.h"

namespace hvd {

void LetterBoxes::open(uint64_t box) {
  boxes_.try_emplace(box);
  newest_ = std::max(newest_, box);
}

Letter LetterBoxes::take(uint64_t box) {
  std::deque<Letter>& letters = boxes_.at(box).letters;
  Letter letter = std::move(letters.front());
  letters.pop_front();
  return letter;
}

Letter LetterBoxes::blank(size_t bytes) {
  if (spare_.room < bytes) return {std::make_unique_for_overwrite<std::byte[]>(bytes), bytes, bytes};
  Letter letter = std::exchange(spare_, {});
  letter.bytes = bytes;
  return letter;
}

void LetterBoxes::reuse(Letter letter) {
  if (letter.room > spare_.room) spare_ = std::move(letter);
}

void LetterBoxes::deliver(uint64_t box, Letter letter) {
  if (box > newest_) throw BadFrame("a letter for box " + std::to_string(box) + ", which was never opened");
  const auto found = boxes_.find(box);
  if (found == boxes_.end()) return;
  if (found->second.letters.size() == kMostWaiting) {
    throw BadFrame("more letters for box " + std::to_string(box) + " than can be under way");
  }
  found->second.letters.push_back(std::move(letter));
  found->second.arrived.fetch_add(1);
}

}  // namespace hvd
