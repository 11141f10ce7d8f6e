#include "engine/host_messages.h"

#include "engine/message_bytes.h"

namespace hvd {
namespace {

enum class Tag : uint8_t {
  kForward = 1,
  kReady = 2,
  kWanted = 3,
  kReleased = 4,
  kWaiting = 5,
  kGone = 6,
  kBeat = 7,
  kLogged = 8
};

void write(Writer& w, const Gone& m) {
  w.number(Tag::kGone);
  w.number(m.rank);
  w.number(static_cast<uint8_t>(m.state));
  w.number(m.cause);
}

Gone read_gone(Reader& r) {
  Gone m;
  m.rank = r.number<int32_t>();
  m.state = r.code<RankState>(kSilent);
  m.cause = r.number<int32_t>();
  if (m.state < kDeparted) throw BadMessage("a rank is gone in state " + std::to_string(m.state));
  return r.finish(m);
}

Bytes copy(BytesView bytes) { return {bytes.begin(), bytes.end()}; }

}  // namespace

Bytes encode(const FromHost& message) {
  Writer w;
  std::visit(Overload{[&](const Forward& m) {
                        w.number(Tag::kForward);
                        w.number(m.rank);
                        w.bytes(m.message);
                      },
                      [&](const Ready& m) {
                        w.number(Tag::kReady);
                        for (const Ready::Item& item : m.items) {
                          w.number(item.id);
                          w.number(static_cast<uint8_t>((item.wanted ? 1 : 0) | (item.with_joined ? 2 : 0)));
                        }
                      },
                      [&](const Wanted& m) {
                        w.number(Tag::kWanted);
                        w.number(m.id);
                      },
                      [&](const Released& m) {
                        w.number(Tag::kReleased);
                        w.number(m.id);
                      },
                      [&](const Waiting& m) {
                        w.number(Tag::kWaiting);
                        w.number(m.id);
                        for (const int rank : m.missing) w.number(rank);
                      },
                      [&](const Gone& m) { write(w, m); }, [&](const Beat&) { w.number(Tag::kBeat); }},
             message);
  return w.take();
}

Bytes encode(const ToHost& message) {
  Writer w;
  std::visit(Overload{[&](const Logged& m) {
                        w.number(Tag::kLogged);
                        w.bytes(m.entry);
                      },
                      [&](const Gone& m) { write(w, m); }, [&](const Beat&) { w.number(Tag::kBeat); }},
             message);
  return w.take();
}

FromHost decode_from_host(BytesView bytes) {
  Reader r(bytes);
  switch (r.number<Tag>()) {
    case Tag::kForward: {
      Forward m;
      m.rank = r.number<int32_t>();
      m.message = copy(r.bytes());
      return r.finish(m);
    }
    case Tag::kReady: {
      Ready m;
      while (r.left() > 0) {
        const auto id = r.number<uint32_t>();
        const auto flags = r.number<uint8_t>();
        if (flags > 3) throw BadMessage("flags " + std::to_string(flags));
        m.items.push_back({id, (flags & 1) != 0, (flags & 2) != 0});
      }
      return m;
    }
    case Tag::kWanted:
      return r.finish(Wanted{r.number<uint32_t>()});
    case Tag::kReleased:
      return r.finish(Released{r.number<uint32_t>()});
    case Tag::kWaiting: {
      Waiting m;
      m.id = r.number<uint32_t>();
      while (r.left() > 0) m.missing.push_back(r.number<int>());
      return m;
    }
    case Tag::kGone:
      return read_gone(r);
    case Tag::kBeat:
      return r.finish(Beat{});
    case Tag::kLogged:
      break;
  }
  throw BadMessage("unknown kind");
}

ToHost decode_to_host(BytesView bytes) {
  Reader r(bytes);
  switch (r.number<Tag>()) {
    case Tag::kLogged: {
      Logged m;
      m.entry = copy(r.bytes());
      return r.finish(m);
    }
    case Tag::kGone:
      return read_gone(r);
    case Tag::kBeat:
      return r.finish(Beat{});
    default:
      throw BadMessage("unknown kind");
  }
}

}  // namespace hvd
