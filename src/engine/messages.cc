#include "engine/messages.h"

#include "engine/message_bytes.h"

namespace hvd {
namespace {

enum class MessageTag : uint8_t {
  kSubmit = 1,
  kWant = 2,
  kClosed = 3,
  kRevoke = 4,
  kEnded = 5,
  kVacated = 6,
  kDisorder = 7,
  kArrived = 8
};
enum class EntryTag : uint8_t {
  kDefine = 1,
  kRun = 2,
  kEvict = 3,
  kRefuse = 4,
  kStop = 5,
  kAddSet = 6,
  kRemoveSet = 7,
  kRemoveEnd = 8,
  kJoinEnd = 9,
  kStand = 10,
  kSettle = 11,
  kBeginSequence = 12,
  kRunSequence = 13,
  kEndSequence = 14
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
                      },
                      [&](const Revoke& m) {
                        w.number(MessageTag::kRevoke);
                        w.number(m.order);
                        w.number(static_cast<uint8_t>(m.unfit));
                      },
                      [&](const Ended& m) {
                        w.number(MessageTag::kEnded);
                        w.number(m.order);
                        w.number(m.rounds);
                      },
                      [&](const Vacated& m) {
                        w.number(MessageTag::kVacated);
                        w.number(m.order);
                      },
                      [&](const Disorder& m) {
                        w.number(MessageTag::kDisorder);
                        w.number(m.sequence);
                      },
                      [&](const Arrived& m) {
                        w.number(MessageTag::kArrived);
                        w.number(m.sequence);
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
                        w.numbers(e.ids);
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
                      },
                      [&](const Stand& e) {
                        w.number(EntryTag::kStand);
                        w.number(e.order);
                        w.number(e.id);
                        w.number(e.tray);
                        w.number(e.letters);
                      },
                      [&](const Settle& e) {
                        w.number(EntryTag::kSettle);
                        w.number(e.order);
                        w.number(e.rounds);
                      },
                      [&](const BeginSequence& e) {
                        w.number(EntryTag::kBeginSequence);
                        w.number(e.sequence);
                        w.number(e.place);
                        w.numbers(e.ids);
                      },
                      [&](const RunSequence& e) {
                        w.number(EntryTag::kRunSequence);
                        w.number(e.sequence);
                        w.number(e.begin);
                        w.number(e.end);
                      },
                      [&](const EndSequence& e) {
                        w.number(EntryTag::kEndSequence);
                        w.number(e.sequence);
                      }},
             entry);
  return w.take();
}

ToCoordinator decode_to_coordinator(BytesView bytes) {
  Reader r(bytes);
  switch (r.number<MessageTag>()) {
    case MessageTag::kSubmit: {
      Submit m;
      m.wanted = r.code<bool>(1);
      m.key = r.key();
      m.meta = r.meta();
      return r.finish(m);
    }
    case MessageTag::kWant:
      return r.finish(Want{r.key()});
    case MessageTag::kClosed:
      return r.finish(Closed{r.number<int32_t>()});
    case MessageTag::kRevoke: {
      Revoke m;
      m.order = r.number<uint64_t>();
      m.unfit = r.code<bool>(1);
      return r.finish(m);
    }
    case MessageTag::kEnded: {
      Ended m;
      m.order = r.number<uint64_t>();
      m.rounds = r.number<uint64_t>();
      return r.finish(m);
    }
    case MessageTag::kVacated:
      return r.finish(Vacated{r.number<uint64_t>()});
    case MessageTag::kDisorder:
      return r.finish(Disorder{r.number<uint64_t>()});
    case MessageTag::kArrived:
      return r.finish(Arrived{r.number<uint64_t>()});
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
      e.ids = r.rest<uint32_t>();
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
    case EntryTag::kStand: {
      Stand e;
      e.order = r.number<uint64_t>();
      e.id = r.number<uint32_t>();
      e.tray = r.number<int32_t>();
      e.letters = r.number<uint64_t>();
      return r.finish(e);
    }
    case EntryTag::kSettle: {
      Settle e;
      e.order = r.number<uint64_t>();
      e.rounds = r.number<uint64_t>();
      return r.finish(e);
    }
    case EntryTag::kBeginSequence: {
      BeginSequence e;
      e.sequence = r.number<uint64_t>();
      e.place = r.number<uint32_t>();
      e.ids = r.rest<uint32_t>();
      return e;
    }
    case EntryTag::kRunSequence: {
      RunSequence e;
      e.sequence = r.number<uint64_t>();
      e.begin = r.number<uint64_t>();
      e.end = r.number<uint64_t>();
      return r.finish(e);
    }
    case EntryTag::kEndSequence:
      return r.finish(EndSequence{r.number<uint64_t>()});
  }
  throw BadMessage("unknown kind");
}

}  // namespace hvd
