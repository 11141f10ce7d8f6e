#include "engine/logging.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <ctime>

namespace hvd {
namespace {

std::atomic<LogLevel> least_level{LogLevel::kWarning};
std::atomic<bool> without_time{false};
std::atomic<int> own_rank{0};

std::string time_text() {
  const auto now = std::chrono::system_clock::now();
  const std::time_t seconds = std::chrono::system_clock::to_time_t(now);
  const auto micros = std::chrono::duration_cast<std::chrono::microseconds>(now.time_since_epoch()).count() % 1'000'000;
  std::tm parts{};
  localtime_r(&seconds, &parts);
  char text[64], whole[96];
  std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S", &parts);
  std::snprintf(whole, sizeof whole, "[%s.%06d: ", text, static_cast<int>(micros));
  return whole;
}

}  // namespace

void configure_logging(LogLevel least, bool hide_time, int rank) {
  least_level = least;
  without_time = hide_time;
  own_rank = rank;
}

void log(LogLevel level, const std::string& text) {
  if (level < least_level.load()) return;
  static constexpr const char* kLetters = "TDIWEF";
  std::string line = without_time ? std::string("[") : time_text();
  line += kLetters[static_cast<int>(level)];
  line += " horovod, rank " + std::to_string(own_rank.load()) + "] " + text + "\n";
  std::FILE* stream = level <= LogLevel::kInfo ? stdout : stderr;
  std::fwrite(line.data(), 1, line.size(), stream);
  std::fflush(stream);
}

}  // namespace hvd
