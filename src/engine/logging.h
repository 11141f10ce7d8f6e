// Log lines of the engine: to standard output up to info, to standard error above, as HOROVOD_LOG_LEVEL asks.
#ifndef HOROVOD_ENGINE_LOGGING_H_
#define HOROVOD_ENGINE_LOGGING_H_

#include <string>

namespace hvd {

enum class LogLevel { kTrace, kDebug, kInfo, kWarning, kError, kFatal };

void configure_logging(LogLevel least, bool hide_time, int rank);
void log(LogLevel level, const std::string& text);

}  // namespace hvd
#endif  // HOROVOD_ENGINE_LOGGING_H_
