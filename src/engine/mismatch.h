// Do the ranks mean the same operation? If not, one text for all of them.
#ifndef HOROVOD_ENGINE_MISMATCH_H_
#define HOROVOD_ENGINE_MISMATCH_H_

#include <map>
#include <string>

#include "engine/request.h"

namespace hvd {

// "ranks 0, 1, 5"
std::string ranks_text(const std::vector<int>& ranks);

// "" if all ranks submitted the same; otherwise what differs, with the tensor, the ranks and their values.
std::string describe_mismatch(const Key& key, const std::map<int, Meta>& by_rank);

}  // namespace hvd
#endif  // HOROVOD_ENGINE_MISMATCH_H_
