#include "engine/messages.h"

#include <cstring>
#include <type_traits>

namespace hvd {
namespace {

// The largest process set that a message can describe, and so the longest list of dimensions.
constexpr uint32_t kMostExtents = 1 << 12;

class Writer {
 public:
  template <typename T>
  void number(T value) {
    static_assert(std::is_trivially_copyable_v<T>);
    append(&value, sizeof value);
  }
  void text(const std::string& value) {
    number(static_cast<uint32_t>(value.size()));
    append(value.data(), value.size());
  }
  void key(const Key& value) {
    number(value.set);
    text(value.name);
  }
  void meta(const Meta& value) {
    number(static_cast<uint8_t>(value.op));
    number(static_cast<uint8_t>(value.dtype));
    number(static_cast<uint8_t>(value.reduce_op));
    number(value.root);
    number(value.prescale);
    number(value.postscale);
    number(static_cast<uint32_t>(value.shape.size()));
    append(value.shape.data(), value.shape.size() * sizeof(int64_t));
  }
  Bytes take() { return std::move(bytes_); }

 private:
  void append(const void* data, size_t n) {
    if (n == 0) return;
    const size_t end = bytes_.size();
    bytes_.resize(end + n);
    std::memcpy(bytes_.data() + end, data, n);
  }
  Bytes bytes_;
};

class Reader {
 public:
  explicit Reader(BytesView bytes) : bytes_(bytes) {}

  template <typename T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  std::string text() {
    const BytesView bytes = take(number<uint32_t>());
    return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  template <typename Enum>
  Enum code(int last) {
    const int value = number<uint8_t>();
    if (value > last) throw BadMessage("code " + std::to_string(value) + ", the last is " + std::to_string(last));
    return static_cast<Enum>(value);
  }
  Key key() {
    const auto set = number<int32_t>();
    return {set, text()};
  }
  Meta meta() {
    Meta value;
    value.op = code<hvd_op>(HVD_REMOVE_PROCESS_SET);
    value.dtype = code<hvd_dtype>(HVD_DTYPES - 1);
    value.reduce_op = code<hvd_reduce_op>(HVD_PRODUCT);
    value.root = number<int32_t>();
    value.prescale = number<double>();
    value.postscale = number<double>();
    const auto dims = number<uint32_t>();
    if (dims > kMostExtents) throw BadMessage(std::to_string(dims) + " dimensions");
    for (uint32_t i = 0; i < dims; ++i) value.shape.push_back(number<int64_t>());
    return value;
  }
  BytesView take(size_t n) {
    if (n > bytes_.size()) {
      throw BadMessage(std::to_string(n) + " bytes expected, " + std::to_string(bytes_.size()) + " left");
    }
    const BytesView head = bytes_.first(n);
    bytes_ = bytes_.subspan(n);
    return head;
  }
  size_t left() const { return bytes_.size(); }
  template <typename T>
  T finish(T value) const {
    if (!bytes_.empty()) throw BadMessage(std::to_string(bytes_.size()) + " bytes too many");
    return value;
  }

 private:
  BytesView bytes_;
};

enum class MessageTag : uint8_t { kSubmit = 1, kWant = 2, kClosed = 3 };
enum class EntryTag : uint8_t {
  kDefine = 1,
  kRun = 2,
  kEvict = 3,
  kRefuse = 4,
  kStop = 5,
  kAddSet = 6,
  kRemoveSet = 7,
  kRemoveEnd = 8,
  kJoinEnd = 9
};

template <typename... Fs>
struct Overload : Fs... {
  using Fs::operator()...;
};

}  // namespace

Bytes encode(const ToCoordinator& message) {
  Writer w;
  std::visit(Overload{[&](const Submit& m) {
                        w.number(MessageTag::kSubmit);
                        w.number(static_cast<uint8_t>(m.wanted));
                        w.key(m.key);
                        w.meta(m.meta);
                      },
                      [&](const Want& m) {
                        w.number(MessageTag::kWant);
                        w.key(m.key);
                      },
                      [&](const Closed& m) {
                        w.number(MessageTag::kClosed);
                        w.number(m.set);
                      }},
             message);
  return w.take();
}

Bytes encode(const LogEntry& entry) {
  Writer w;
  std::visit(Overload{[&](const Define& e) {
                        w.number(EntryTag::kDefine);
                        w.number(e.id);
                        w.key(e.key);
                        w.meta(e.meta);
                      },
                      [&](const Run& e) {
                        w.number(EntryTag::kRun);
                        for (const uint32_t id : e.ids) w.number(id);
                      },
                      [&](const Evict& e) {
                        w.number(EntryTag::kEvict);
                        w.number(e.id);
                      },
                      [&](const Refuse& e) {
                        w.number(EntryTag::kRefuse);
                        w.key(e.key);
                        w.text(e.text);
                      },
                      [&](const Stop& e) {
                        w.number(EntryTag::kStop);
                        w.number(static_cast<uint8_t>(e.status));
                        w.text(e.text);
                      },
                      [&](const AddSet& e) {
                        w.number(EntryTag::kAddSet);
                        w.number(e.set);
                        for (const int rank : e.ranks) w.number(rank);
                      },
                      [&](const RemoveSet& e) {
                        w.number(EntryTag::kRemoveSet);
                        w.number(e.set);
                      },
                      [&](const RemoveEnd& e) {
                        w.number(EntryTag::kRemoveEnd);
                        w.number(e.set);
                      },
                      [&](const JoinEnd& e) {
                        w.number(EntryTag::kJoinEnd);
                        w.number(e.last);
                      }},
             entry);
  return w.take();
}

ToCoordinator decode_to_coordinator(BytesView bytes) {
  Reader r(bytes);
  switch (r.number<MessageTag>()) {
    case MessageTag::kSubmit: {
      Submit m;
      m.wanted = r.number<uint8_t>() != 0;
      m.key = r.key();
      m.meta = r.meta();
      return r.finish(m);
    }
    case MessageTag::kWant:
      return r.finish(Want{r.key()});
    case MessageTag::kClosed:
      return r.finish(Closed{r.number<int32_t>()});
  }
  throw BadMessage("unknown kind");
}

LogEntry decode_log_entry(BytesView bytes) {
  Reader r(bytes);
  switch (r.number<EntryTag>()) {
    case EntryTag::kDefine: {
      Define e;
      e.id = r.number<uint32_t>();
      e.key = r.key();
      e.meta = r.meta();
      return r.finish(e);
    }
    case EntryTag::kRun: {
      Run e;
      e.ids.reserve(r.left() / sizeof(uint32_t));
      while (r.left() > 0) e.ids.push_back(r.number<uint32_t>());
      return e;
    }
    case EntryTag::kEvict:
      return r.finish(Evict{r.number<uint32_t>()});
    case EntryTag::kRefuse: {
      Refuse e;
      e.key = r.key();
      e.text = r.text();
      return r.finish(e);
    }
    case EntryTag::kStop: {
      Stop e;
      e.status = r.code<hvd_status>(HVD_FORKED);
      e.text = r.text();
      return r.finish(e);
    }
    case EntryTag::kAddSet: {
      AddSet e;
      e.set = r.number<int32_t>();
      while (r.left() > 0) e.ranks.push_back(r.number<int>());
      return e;
    }
    case EntryTag::kRemoveSet:
      return r.finish(RemoveSet{r.number<int32_t>()});
    case EntryTag::kRemoveEnd:
      return r.finish(RemoveEnd{r.number<int32_t>()});
    case EntryTag::kJoinEnd:
      return r.finish(JoinEnd{r.number<int32_t>()});
  }
  throw BadMessage("unknown kind");
}

}  // namespace hvd
