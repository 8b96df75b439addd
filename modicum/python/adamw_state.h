// AdamW's state and the Python objects that its memory depends on. Internal to `python`.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "modicum/memory/memory.h"
#include "modicum/optim/optim.h"
#include "modicum/python/arrays.h"
#include "modicum/python/bindings.h"

namespace modicum::python {

// (fqn, shape, runs as (first, n), group, master, out): a shard in Python.
using WrittenRuns = std::vector<std::pair<int64_t, int64_t>>;
using WrittenShard =
    std::tuple<std::string, std::vector<int64_t>, WrittenRuns, int, nb::object, nb::object>;

// The shards, and the arrays that own their memory.
struct Written {
  AdamWSpec spec;
  std::vector<AnyArray> arrays;
};

// USAGE, MISMATCH or UNSUPPORTED, naming the parameter, for arrays that do not fit the format.
Written written(const std::vector<WrittenShard>& shards, const std::vector<AdamOptions>& groups,
                const std::string& format, uint64_t seed);

// UNSUPPORTED unless the array is float32, bfloat16 or float16.
DType dtype_of(const AnyArray& array, const std::string& fqn);

// Calls `pin` and `unpin` with address and bytes, under the GIL; an empty Pinner if they are None.
Pinner pinner_of(const nb::object& pin, const nb::object& unpin,
                 const std::optional<uint64_t>& limit);

// The charges of a State: AdamW's, and `slots` of the ring for each thread.
Footprint footprint_of(const AdamWSpec& spec, int slots, int threads);

struct State {
  const std::shared_ptr<Ledger> ledger;
  const std::vector<AnyArray> arrays;
  const Footprint footprint;
  const int threads;
  AdamW adamw;
  const Pinner pinner;
  Buffer staging;  // the ring of a step; between steps, gradients in flight use it

  // Errors as AdamW's. Signal handlers of Python run on the calling thread.
  State(Written made, std::shared_ptr<Ledger> of, int slots, int count, const Pinner& pins);
  ~State();
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  // USAGE for an unknown shard.
  const ShardSpec& shard(size_t index) const;
  // `adamw`; UNSUPPORTED in a forked process without the state or the parameters.
  AdamW& here();
};

// Passes new parameters to Python's `send` and `wait`, which must outlive it. Keeps the first error
// and sends nothing after it. Called by the threads of a step, which take the GIL for each call.
class Sending {
 public:
  Sending(State& state, const nb::object& send, const nb::object& wait, const std::string& dtype);
  Sending(const Sending&) = delete;
  Sending& operator=(const Sending&) = delete;

  const Outlet& outlet() const noexcept { return outlet_; }
  void require_sent() const;  // throws the first error

 private:
  template <typename Call>
  void call(Call&& of) noexcept;

  Outlet outlet_;
  std::exception_ptr error_;  // guarded by the GIL
};

}  // namespace modicum::python
