// What can be wrong with a request on its own, on this rank: told where it was made.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "collectives/batch.h"
#include "engine/engine.h"
#include "engine/mismatch.h"
#include "kernels/kernels.h"

namespace hvd {
namespace {

std::string describe(const Request& request) {
  return std::string(name_of(request.meta.op)) + " of tensor '" + request.key.name + "'";
}

// Throws unless the tensor is of a size that can exist.
void check_shape(const Request& request) {
  const std::vector<int64_t>& shape = request.meta.shape;
  if (shape.size() > HVD_MAX_DIMS) {
    throw InvalidError(describe(request) + ": " + std::to_string(shape.size()) + " dimensions; at most " +
                       std::to_string(HVD_MAX_DIMS) + " are supported.");
  }
  uint64_t elements = 1;
  for (size_t i = 0; i < shape.size(); ++i) {
    const int64_t extent = shape[i] == kAnyRows ? request.rows : shape[i];
    if (extent < 0) throw InvalidError(describe(request) + ": negative extent in shape " + shape_text(shape) + ".");
    if (extent != 0 && elements > (uint64_t{1} << 56) / static_cast<uint64_t>(extent)) {
      throw InvalidError(describe(request) + ": shape " + shape_text(shape) + " is too large.");
    }
    elements *= static_cast<uint64_t>(extent);
  }
  // Of a reducescatter a rank may get no rows.
  const bool has_output =
      moves_rows(request.meta.op) || request.meta.op == HVD_REDUCESCATTER || request.output != nullptr;
  if (elements > 0 && (request.input == nullptr || !has_output)) {
    throw InvalidError(describe(request) + ": the tensor has " + std::to_string(elements) + " elements but no memory.");
  }
}

void check_reduction(const Request& request) {
  const Meta& meta = request.meta;
  const bool supported = meta.reduce_op == HVD_ADASUM ? kernels().adasum_sums[meta.dtype] != nullptr
                                                      : kernels().fold[meta.dtype][meta.reduce_op] != nullptr;
  if (!supported) {
    throw InvalidError(describe(request) + ": reduction " + name_of(meta.reduce_op) + " is not supported for " +
                       name_of(meta.dtype) + ".");
  }
  if ((meta.prescale != 1.0 || meta.postscale != 1.0) && kernels().scale_copy[meta.dtype] == nullptr) {
    throw InvalidError(describe(request) + ": prescale_factor and postscale_factor are not supported for " +
                       name_of(meta.dtype) + ".");
  }
  if (std::isnan(meta.prescale) || std::isnan(meta.postscale)) {
    throw InvalidError(describe(request) + ": prescale_factor or postscale_factor is not a number.");
  }
}

}  // namespace

std::vector<int> Engine::ranks_of(int set) const {
  const std::lock_guard lock(mutex_);
  return set < 0 || static_cast<size_t>(set) >= sets_.size() ? std::vector<int>() : sets_[static_cast<size_t>(set)];
}

void Engine::validate(Request& request) const {
  const Meta& meta = request.meta;
  const int set = request.key.set;
  if (set < 0 || static_cast<size_t>(set) >= sets_.size() || sets_[static_cast<size_t>(set)].empty()) {
    throw InvalidError(describe(request) + ": there is no process set with id " + std::to_string(set) + ".");
  }
  const std::vector<int>& ranks = sets_[static_cast<size_t>(set)];
  if (!std::binary_search(ranks.begin(), ranks.end(), world_.rank)) {
    throw InvalidError(describe(request) + ": rank " + std::to_string(world_.rank) +
                       " is not a member of process set " + std::to_string(set) + " (" + ranks_text(ranks) + ").");
  }
  if (request.key.name.empty() || request.key.name.size() > HVD_MAX_NAME) {
    throw InvalidError(std::string(name_of(meta.op)) + ": a tensor's name has 1 to " + std::to_string(HVD_MAX_NAME) +
                       " bytes, not " + std::to_string(request.key.name.size()) + ".");
  }
  switch (meta.op) {
    case HVD_ALLREDUCE:
      check_shape(request);
      return check_reduction(request);
    case HVD_BROADCAST:
      check_shape(request);
      if (!std::binary_search(ranks.begin(), ranks.end(), meta.root)) {
        throw InvalidError("broadcast received invalid root rank " + std::to_string(meta.root) + " for tensor '" +
                           request.key.name + "': process set " + std::to_string(set) + " has " + ranks_text(ranks) +
                           ".");
      }
      return;
    case HVD_ALLGATHER:
    case HVD_ALLTOALL:
    case HVD_REDUCESCATTER:
      return validate_rows(request, ranks);
    case HVD_BARRIER:
      return;
    case HVD_JOIN:
    case HVD_ADD_PROCESS_SET:
    case HVD_REMOVE_PROCESS_SET:
      return validate_set_change(request);
  }
}

// Also fills in how many rows go where.
void Engine::validate_rows(Request& request, const std::vector<int>& ranks) const {
  const Meta& meta = request.meta;
  if (meta.op == HVD_REDUCESCATTER) {
    if (meta.shape.empty()) {
      throw InvalidError("Reducescatter does not support scalar inputs: tensor '" + request.key.name + "'.");
    }
    if (meta.reduce_op != HVD_SUM && meta.reduce_op != HVD_AVERAGE) {
      throw Error(HVD_SYSTEM, "Reducescatter currently only supports AVERAGE and SUM. Tensor '" + request.key.name +
                                  "' was to be reduced by " + name_of(meta.reduce_op) + ".");
    }
    check_reduction(request);
    request.rows = meta.shape[0];
  }
  check_shape(request);
  if (meta.op != HVD_ALLTOALL) {
    request.counts = {request.rows};
    return;
  }
  const auto members = static_cast<int64_t>(ranks.size());
  if (request.counts.empty()) {
    if (request.rows % members != 0) {
      throw InvalidError(describe(request) + ": without splits the first dimension, " + std::to_string(request.rows) +
                         ", must be divisible by the number of ranks, " + std::to_string(members) + ".");
    }
    request.counts.assign(ranks.size(), request.rows / members);
  }
  const bool right = request.counts.size() == ranks.size() &&
                     std::all_of(request.counts.begin(), request.counts.end(),
                                 [&](int64_t n) { return n >= 0 && n <= request.rows; }) &&
                     std::accumulate(request.counts.begin(), request.counts.end(), int64_t{0}) <= request.rows;
  if (!right) {
    throw InvalidError(describe(request) + ": splits " + shape_text(request.counts) + " must be " +
                       std::to_string(members) + " numbers from 0 on, whose sum is at most the first dimension, " +
                       std::to_string(request.rows) + ".");
  }
}

void Engine::validate_set_change(const Request& request) const {
  const Meta& meta = request.meta;
  if (request.key.set != 0)
    throw InvalidError(std::string(name_of(meta.op)) + " concerns all ranks, not a process set.");
  if (meta.op == HVD_ADD_PROCESS_SET) {
    const std::vector<int64_t>& ranks = meta.shape;
    const bool ascending = std::adjacent_find(ranks.begin(), ranks.end(), std::greater_equal<>()) == ranks.end();
    if (ranks.empty() || !ascending || ranks.front() < 0 || ranks.back() >= world_.size) {
      throw InvalidError("A process set needs ranks from 0 to " + std::to_string(world_.size - 1) +
                         ", each once and in ascending order, not " + shape_text(ranks) + ".");
    }
    for (size_t set = 0; set < sets_.size(); ++set) {
      if (std::equal(ranks.begin(), ranks.end(), sets_[set].begin(), sets_[set].end())) {
        throw InvalidError("A process set with the ranks " + shape_text(ranks) + " exists already: id " +
                           std::to_string(set) + ".");
      }
    }
  }
  if (meta.op == HVD_REMOVE_PROCESS_SET) {
    const int set = meta.root;
    if (set <= 0 || static_cast<size_t>(set) >= sets_.size() || sets_[static_cast<size_t>(set)].empty()) {
      throw InvalidError("There is no process set with id " + std::to_string(set) + " that could be removed.");
    }
  }
}

}  // namespace hvd
