#include "transport/link.h"

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace hvd {
namespace {

constexpr size_t kStaging = 64 << 10;
// From here on bytes are read straight to where they belong, not by way of the staging buffer.
constexpr size_t kReadInPlace = 16 << 10;
constexpr size_t kFramesPerWrite = 32;
// A frame of up to so many bytes is copied together: the kernel has less to do for one place than for two.
constexpr size_t kWriteAsOne = 1 << 10;
// A credit is worth a frame only when it lets the sender go on for a while.
constexpr uint64_t kCreditStep = Link::kWindow / 4;

}  // namespace

Link::Shared::Shared() : staging(make_aligned(kStaging)) {}

Link::Link(int rank, const Connected& connected, Counters& counters, Shared& shared)
    : rank_(rank),
      wire_(connected, "rank " + std::to_string(rank)),
      counters_(counters),
      shared_(shared),
      lanes_(FrameHeader::kLanes) {}

Link::Lane& Link::at(int lane) {
  std::unique_ptr<Lane>& found = lanes_[static_cast<size_t>(lane)];
  if (!found) found = std::make_unique<Lane>();
  return *found;
}

void Link::touch() {
  if (dirty_ || closed_) return;
  dirty_ = true;
  shared_.dirty.push_back(this);
}

// ---- Sending --------------------------------------------------------------------------------------------------------

uint64_t Link::send(int lane_id, const std::byte* data, size_t bytes) {
  Lane& lane = at(lane_id);
  if (bytes == 0 || abandoned_) return lane.queued;
  if (lane.out.empty()) sending_.push_back(lane_id);
  lane.out.push_back({data, bytes});
  lane.queued += bytes;
  touch();
  return lane.queued;
}

uint64_t Link::post(uint64_t box, const std::byte* data, size_t bytes) {
  if (abandoned_ || said_bye_) return letters_posted_;
  outgoing_.push_back({{FrameHeader::kLetter, 0, bytes, box}, data, 0});
  touch();
  return ++letters_posted_;
}

void Link::Frame::keep() {
  if (kept) return;
  kept = std::make_unique_for_overwrite<std::byte[]>(header.value);
  std::memcpy(kept.get(), payload, header.value);
  payload = kept.get();
}

void Link::keep_letters(uint64_t box) {
  for (Frame& frame : outgoing_) {
    if (frame.header.kind == FrameHeader::kLetter && frame.header.position == box) frame.keep();
  }
}

void Link::let_go(int lane_id) {
  std::unique_ptr<Lane>& lane = lanes_[static_cast<size_t>(lane_id)];
  if (!lane) return;
  for (Frame& frame : outgoing_) {
    if (frame.header.kind == FrameHeader::kData && frame.header.lane == static_cast<uint32_t>(lane_id)) frame.keep();
  }
  lane->out.clear();
  lane->into.clear();
  std::erase(sending_, lane_id);
}

// Turns what may be sent into frames, one per lane and turn.
void Link::fill_frames() {
  for (const int lane_id : std::exchange(crediting_, {})) {
    Lane& lane = at(lane_id);
    lane.credited = lane.received.load();
    outgoing_.push_back({{FrameHeader::kCredit, static_cast<uint32_t>(lane_id), 0, lane.credited}, nullptr, 0});
  }
  size_t turn = 0;
  while (outgoing_.size() < kFramesPerWrite && turn < sending_.size()) {
    const int lane_id = sending_[turn];
    Lane& lane = at(lane_id);
    const uint64_t room = lane.taken_by_peer + kWindow - lane.framed;
    if (room == 0) {
      ++turn;
      continue;
    }
    Span<const std::byte>& front = lane.out.front();
    const uint64_t bytes = std::min({static_cast<uint64_t>(front.bytes), room, FrameHeader::kMostBytes});
    outgoing_.push_back({{FrameHeader::kData, static_cast<uint32_t>(lane_id), bytes, lane.framed}, front.data, 0});
    lane.framed += bytes;
    front.data += bytes;
    front.bytes -= bytes;
    if (front.bytes == 0) lane.out.pop_front();
    // The lane goes to the end of the queue, or leaves it.
    std::rotate(sending_.begin() + static_cast<ptrdiff_t>(turn), sending_.begin() + static_cast<ptrdiff_t>(turn) + 1,
                sending_.end());
    if (lane.out.empty()) sending_.pop_back();
  }
}

// Gives the socket as many frames as one system call may take.
ssize_t Link::write_frames() {
  if (const Frame& only = outgoing_.front();
      outgoing_.size() == 1 && only.done == 0 && only.bytes() <= kWriteAsOne && !wire_.encrypted()) {
    std::array<std::byte, kWriteAsOne> bytes;
    std::memcpy(bytes.data(), &only.header, sizeof only.header);
    if (only.payload != nullptr) std::memcpy(bytes.data() + sizeof only.header, only.payload, only.header.value);
    return wire_.write(bytes.data(), only.bytes());
  }
  std::array<iovec, 2 * kFramesPerWrite> parts;
  size_t count = 0;
  for (const Frame& frame : outgoing_) {
    if (count + 2 > parts.size()) break;
    if (frame.done < sizeof frame.header) {
      parts[count++] = {const_cast<std::byte*>(reinterpret_cast<const std::byte*>(&frame.header)) + frame.done,
                        sizeof frame.header - frame.done};
    }
    if (frame.payload == nullptr) continue;
    const size_t skip = frame.done > sizeof frame.header ? frame.done - sizeof frame.header : 0;
    parts[count++] = {const_cast<std::byte*>(frame.payload) + skip, frame.header.value - skip};
  }
  return wire_.write(parts.data(), count);
}

bool Link::write() {
  bool moved = false;
  while (!closed_ && write_error_.empty()) {
    if (!said_bye_ && !abandoned_ && outgoing_.size() < kFramesPerWrite / 2) fill_frames();
    if (outgoing_.empty()) {
      if (said_bye_ && !std::exchange(ended_writing_, true)) wire_.end_writing();
      if (wire_.has_output() && !wire_.flush() && errno != EAGAIN && errno != EWOULDBLOCK) {
        fail_writing(std::strerror(errno));
      }
      return moved;
    }
    const ssize_t n = write_frames();
    if (n < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN && errno != EWOULDBLOCK) fail_writing(std::strerror(errno));
      return moved;
    }
    moved = true;
    counters_.net_bytes_out.add(static_cast<uint64_t>(n));
    for (auto left = static_cast<size_t>(n); left > 0;) {
      Frame& frame = outgoing_.front();
      const size_t step = std::min(left, frame.bytes() - frame.done);
      const size_t payload_before = std::max(frame.done, sizeof frame.header);
      frame.done += step;
      left -= step;
      if (frame.payload != nullptr && frame.done > payload_before) {
        if (frame.header.kind == FrameHeader::kData) {
          Flag& sent = at(static_cast<int>(frame.header.lane)).sent;
          sent.store(sent.load() + (frame.done - payload_before));
        }
        counters_.net_payload_out.add(frame.done - payload_before);
      }
      if (frame.done == frame.bytes()) {
        counters_.net_frames_out.add();
        if (frame.header.kind == FrameHeader::kLetter) letters_sent_.fetch_add(1);
        outgoing_.pop_front();
      }
    }
  }
  return moved;
}

void Link::say_bye(RankState state, int cause) {
  if (said_bye_ || closed_ || !write_error_.empty()) return;
  outgoing_.push_back(
      {{FrameHeader::kBye, 0, static_cast<uint64_t>(state), static_cast<uint64_t>(static_cast<int64_t>(cause))},
       nullptr,
       0});
  said_bye_ = true;
  (void)write();
  if (blocked()) touch();
}

// What the peer had sent before still counts, its last word above all: read() comes to the end of it.
void Link::fail_writing(const std::string& why) {
  write_error_ = why;
  outgoing_.clear();
  wire_.cut();
}

void Link::abandon() {
  abandoned_ = true;
  // Whole frames that have not begun are simply not sent. One that has can't be ended: its memory is not ours any more.
  while (!outgoing_.empty() && outgoing_.back().done == 0) outgoing_.pop_back();
  if (!outgoing_.empty() && outgoing_.front().payload != nullptr && !outgoing_.front().kept) {
    outgoing_.clear();
    lose("given up in the middle of a transfer");
    wire_.cut();
  }
  for (const auto& lane : lanes_) {
    if (!lane) continue;
    lane->out.clear();
    lane->into.clear();
  }
  sending_.clear();
}

// ---- Receiving ------------------------------------------------------------------------------------------------------

uint64_t Link::receive(int lane_id, std::byte* into, size_t bytes) {
  Lane& lane = at(lane_id);
  if (bytes == 0 || abandoned_) return lane.posted;
  lane.posted += bytes;
  const uint64_t end = lane.posted;
  // What has come early is moved now.
  while (bytes > 0 && !lane.early.empty()) {
    std::vector<std::byte>& first = lane.early.front();
    const size_t n = std::min(bytes, first.size() - lane.early_skip);
    std::memcpy(into, first.data() + lane.early_skip, n);
    into += n;
    bytes -= n;
    lane.early_skip += n;
    lane.received.store(lane.received.load() + n);
    if (lane.early_skip == first.size()) {
      lane.early.pop_front();
      lane.early_skip = 0;
    }
  }
  if (bytes > 0) lane.into.push_back({into, bytes});
  give_credit(lane_id, lane);
  return end;
}

void Link::give_credit(int lane_id, Lane& lane) {
  if (lane.received.load() - lane.credited < kCreditStep || end_ != End::kNone) return;
  if (std::find(crediting_.begin(), crediting_.end(), lane_id) == crediting_.end()) crediting_.push_back(lane_id);
  touch();
}

void Link::lose(const std::string& why) {
  if (end_ == End::kNone) {
    end_ = End::kLost;
    lost_because_ = write_error_.empty() ? why : write_error_;
  }
  closed_ = true;
}

void Link::reset(const std::string& why) {
  lose(why);
  wire_.reset();
}

// Where the rest of a large payload goes straight to, if that is known. lane: whose it is, null for a letter's.
Link::Span<std::byte> Link::place_of_payload(Lane*& lane) {
  if (payload_left_ < kReadInPlace || abandoned_) return {nullptr, 0};
  if (header_.kind == FrameHeader::kLetter)
    return {letter_.data.get() + (letter_.bytes - payload_left_), payload_left_};
  lane = &at(static_cast<int>(header_.lane));
  if (lane->into.empty() || lane->into.front().bytes < kReadInPlace) return {nullptr, 0};
  return {lane->into.front().data, std::min(static_cast<size_t>(payload_left_), lane->into.front().bytes)};
}

// So many bytes have come there.
void Link::placed(Lane* lane, size_t bytes) {
  if (lane == nullptr) return letter_has(bytes);
  payload_left_ -= bytes;
  lane->arrived += bytes;
  Span<std::byte>& front = lane->into.front();
  front.data += bytes;
  front.bytes -= bytes;
  if (front.bytes == 0) lane->into.pop_front();
  lane->received.store(lane->received.load() + bytes);
  give_credit(static_cast<int>(header_.lane), *lane);
}

bool Link::read() {
  bool moved = false;
  while (!closed_) {
    Lane* lane = nullptr;
    const Span<std::byte> place = place_of_payload(lane);
    const bool in_place = place.data != nullptr;
    // After a large payload, and credits, another one is likely to come: its header alone is read along, or first.
    std::array<std::byte, sizeof(FrameHeader)> next;
    const size_t next_room = in_place && place.bytes == payload_left_ && !wire_.encrypted() ? next.size() : 0;
    const bool header_first = payload_left_ == 0 && last_payload_ >= kStaging;
    const size_t staging_room = header_first ? sizeof header_ - header_bytes_ : kStaging;
    const size_t room = in_place ? place.bytes + next_room : staging_room;
    const ssize_t n = next_room > 0 ? wire_.read(place.data, place.bytes, next.data(), next_room)
                                    : wire_.read(in_place ? place.data : shared_.staging.get(), room);
    if (n < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN && errno != EWOULDBLOCK) lose(std::strerror(errno));
      return moved;
    }
    if (n == 0) {
      lose("the connection was closed");
      return true;
    }
    moved = true;
    bytes_in_ += static_cast<uint64_t>(n);
    const std::byte* data = in_place ? next.data() : shared_.staging.get();
    auto bytes = static_cast<size_t>(n);
    if (in_place) {
      const size_t here = std::min(bytes, place.bytes);
      placed(lane, here);
      bytes -= here;
    }
    while (bytes > 0) {
      const size_t taken = take(data, bytes);
      data += taken;
      bytes -= taken;
    }
    if (static_cast<size_t>(n) < room && !wire_.has_input()) return moved;  // the socket is empty
  }
  return moved;
}

// Takes some bytes of a header or of a payload.
size_t Link::take(const std::byte* data, size_t bytes) {
  if (payload_left_ > 0) {
    const size_t n = std::min<size_t>(bytes, payload_left_);
    if (header_.kind == FrameHeader::kLetter) {
      if (!abandoned_) std::memcpy(letter_.data.get() + (letter_.bytes - payload_left_), data, n);
      letter_has(n);
      return n;
    }
    payload_left_ -= n;
    Lane& lane = at(static_cast<int>(header_.lane));
    lane.arrived += n;  // also of what nobody wants any more: the next frame is checked against it
    if (abandoned_) return n;
    place(lane, data, n);
    give_credit(static_cast<int>(header_.lane), lane);
    return n;
  }
  const size_t n = std::min(bytes, sizeof header_ - header_bytes_);
  std::memcpy(reinterpret_cast<std::byte*>(&header_) + header_bytes_, data, n);
  header_bytes_ += n;
  if (header_bytes_ == sizeof header_) {
    header_bytes_ = 0;
    handle_header();
  }
  return n;
}

void Link::handle_header() {
  check_frame(header_);
  if (end_ == End::kBye) throw BadFrame("something after the last word");
  if (header_.kind == FrameHeader::kBye) {
    end_ = End::kBye;
    bye_state_ = static_cast<RankState>(header_.value);
    bye_cause_ = static_cast<int>(static_cast<int64_t>(header_.position));
    return;
  }
  if (abandoned_) {
    if (header_.kind != FrameHeader::kCredit) payload_left_ = header_.value;
    return;
  }
  if (header_.kind == FrameHeader::kLetter) {
    payload_left_ = last_payload_ = header_.value;
    letter_ = boxes_.blank(header_.value);
    return;
  }
  Lane& lane = at(static_cast<int>(header_.lane));
  if (header_.kind == FrameHeader::kCredit) {
    if (header_.position < lane.taken_by_peer || header_.position > lane.framed) {
      throw BadFrame("a credit up to " + std::to_string(header_.position) + " of " + std::to_string(lane.framed));
    }
    lane.taken_by_peer = header_.position;
    if (!sending_.empty()) touch();
    return;
  }
  if (header_.position != lane.arrived) {
    throw BadFrame("bytes at " + std::to_string(header_.position) + " where " + std::to_string(lane.arrived) +
                   " was expected");
  }
  if (lane.arrived + header_.value > lane.credited + kWindow) throw BadFrame("more bytes than were granted");
  payload_left_ = last_payload_ = header_.value;
}

// So many more bytes of the letter have come.
void Link::letter_has(size_t bytes) {
  payload_left_ -= bytes;
  if (payload_left_ == 0 && !abandoned_) boxes_.deliver(header_.position, std::move(letter_));
}

void Link::place(Lane& lane, const std::byte* data, size_t bytes) {
  while (bytes > 0 && !lane.into.empty()) {
    Span<std::byte>& front = lane.into.front();
    const size_t n = std::min(bytes, front.bytes);
    std::memcpy(front.data, data, n);
    data += n;
    bytes -= n;
    front.data += n;
    front.bytes -= n;
    if (front.bytes == 0) lane.into.pop_front();
    lane.received.store(lane.received.load() + n);
  }
  if (bytes > 0) lane.early.emplace_back(data, data + bytes);
}

}  // namespace hvd
