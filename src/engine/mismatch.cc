#include "engine/mismatch.h"

#include <cstdio>
#include <functional>

namespace hvd {
namespace {

std::string number_text(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.17g", value);
  return text;
}

// The aspects in which ranks can differ, in the order in which they are worth telling.
struct Aspect {
  std::function<bool(const Meta&)> applies;
  std::function<std::string(const Meta&)> title;
  std::function<std::string(const Meta&)> value;
};

const std::vector<Aspect>& aspects() {
  const auto always = [](const Meta&) { return true; };
  static const std::vector<Aspect> kAspects = {
      {always, [](const Meta&) { return std::string("operations"); },
       [](const Meta& m) { return std::string(name_of(m.op)); }},
      {always, [](const Meta&) { return std::string("data types"); },
       [](const Meta& m) { return std::string(name_of(m.dtype)); }},
      {[](const Meta& m) { return m.op == HVD_ALLREDUCE || m.op == HVD_REDUCESCATTER; },
       [](const Meta&) { return std::string("reduction operation"); },
       [](const Meta& m) { return std::string(name_of(m.reduce_op)); }},
      {[](const Meta& m) { return m.op == HVD_BROADCAST; },
       [](const Meta&) { return std::string("BROADCAST root ranks"); },
       [](const Meta& m) { return "root rank " + std::to_string(m.root); }},
      {always, [](const Meta& m) { return std::string(name_of(m.op)) + " tensor shapes"; },
       [](const Meta& m) { return "shape " + shape_text(m.shape); }},
      {always, [](const Meta&) { return std::string("prescale and/or postscale factors"); },
       [](const Meta& m) {
         return "prescale_factor " + number_text(m.prescale) + ", postscale_factor " + number_text(m.postscale);
       }},
  };
  return kAspects;
}

}  // namespace

std::string ranks_text(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  return text;
}

namespace {

// A set to add or remove: one text for all that can differ.
std::string describe_set_mismatch(const std::map<int, Meta>& by_rank) {
  const Meta& first = by_rank.begin()->second;
  for (const auto& [rank, meta] : by_rank) {
    if (meta == first) continue;
    const auto text = [](const Meta& m) {
      return m.op == HVD_ADD_PROCESS_SET ? "add " + shape_text(m.shape) : "remove id " + std::to_string(m.root);
    };
    return "Attempted to register process set with mismatching size/values on different ranks: " +
           ranks_text({by_rank.begin()->first}) + " asks to " + text(first) + ", " + ranks_text({rank}) + " to " +
           text(meta) + ".";
  }
  return "";
}

}  // namespace

std::string describe_mismatch(const Key& key, const std::map<int, Meta>& by_rank) {
  const Meta& first = by_rank.begin()->second;
  if (first.op == HVD_ADD_PROCESS_SET || first.op == HVD_REMOVE_PROCESS_SET) return describe_set_mismatch(by_rank);
  if (moves_rows(first.op) && first.shape.empty()) {
    return std::string("Process-set rank zero tried to ") + name_of(first.op) + " a rank-zero tensor: '" + key.name +
           "' is a scalar, and " + name_of(first.op) + " needs a first dimension.";
  }
  for (const Aspect& aspect : aspects()) {
    if (!aspect.applies(first)) continue;
    std::vector<std::pair<std::string, std::vector<int>>> groups;  // value, ranks; in order of their first rank
    for (const auto& [rank, meta] : by_rank) {
      const std::string value = aspect.value(meta);
      size_t g = 0;
      while (g < groups.size() && groups[g].first != value) ++g;
      if (g == groups.size()) groups.push_back({value, {}});
      groups[g].second.push_back(rank);
    }
    if (groups.size() == 1) continue;
    std::string text = "Mismatched " + aspect.title(first) + " for tensor '" + key.name + "'";
    if (key.set != 0) text += " of process set " + std::to_string(key.set);
    for (size_t g = 0; g < groups.size(); ++g) {
      text += (g == 0 ? ": " : "; ") + ranks_text(groups[g].second) +
              (groups[g].second.size() == 1 ? " has " : " have ") + groups[g].first;
    }
    return text + ". All ranks must submit the same under one name.";
  }
  return "";
}

}  // namespace hvd
