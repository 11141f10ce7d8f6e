// How the fields of messages become bytes and come back. Every read is checked: see messages.h.
#ifndef HOROVOD_ENGINE_MESSAGE_BYTES_H_
#define HOROVOD_ENGINE_MESSAGE_BYTES_H_

#include <cstring>
#include <string>
#include <type_traits>
#include <utility>

#include "engine/messages.h"

namespace hvd {

// The largest process set that a message can describe, and so the longest list of dimensions.
inline constexpr uint32_t kMostExtents = 1 << 12;

class Writer {
 public:
  template <typename T>
  void number(T value) {
    static_assert(std::is_trivially_copyable_v<T>);
    append(&value, sizeof value);
  }
  // Up to the end of the message.
  template <typename T>
  void numbers(const std::vector<T>& values) {
    append(values.data(), values.size() * sizeof(T));
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
  void bytes(BytesView value) {
    number(static_cast<uint32_t>(value.size()));
    append(value.data(), value.size());
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
  // All up to the end of the message.
  template <typename T>
  std::vector<T> rest() {
    if (left() % sizeof(T) != 0) throw BadMessage(std::to_string(left()) + " bytes of numbers");
    std::vector<T> values(left() / sizeof(T));
    const BytesView all = take(left());
    if (!values.empty()) std::memcpy(values.data(), all.data(), all.size());
    return values;
  }
  std::string text() {
    const BytesView bytes = take(number<uint32_t>());
    return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  BytesView bytes() { return take(number<uint32_t>()); }
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

template <typename... Fs>
struct Overload : Fs... {
  using Fs::operator()...;
};
template <typename... Fs>
Overload(Fs...) -> Overload<Fs...>;  // clang has needed this until its version 17

}  // namespace hvd
#endif  // HOROVOD_ENGINE_MESSAGE_BYTES_H_
