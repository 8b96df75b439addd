// AdamW's state with all that its memory depends on in Python. Internal to `python`.
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

// (fqn, runs as (first, n), group, master, out), as Python says a shard.
using WrittenRuns = std::vector<std::pair<int64_t, int64_t>>;
using WrittenShard = std::tuple<std::string, WrittenRuns, int, nb::object, nb::object>;

// The shards as values, and the arrays whose memory they are.
struct Written {
  AdamWSpec spec;
  std::vector<AnyArray> arrays;
};

// USAGE, MISMATCH or UNSUPPORTED, naming the parameter, for arrays that don't go with the format.
Written written(const std::vector<WrittenShard>& shards, const std::vector<AdamOptions>& groups,
                const std::string& format, uint64_t seed);

// Of a gradient or a parameter; UNSUPPORTED where it is none of float32, bfloat16 and float16.
DType dtype_of(const AnyArray& array, const std::string& fqn);

// What calls `pin` and `unpin` with address and bytes; nothing where they are None.
Pinner pinner_of(const nb::object& pin, const nb::object& unpin,
                 const std::optional<uint64_t>& limit);

// What a State charges: with `slots` of its ring for each thread.
Footprint footprint_of(const AdamWSpec& spec, int slots, int threads);

struct State {
  const std::shared_ptr<Ledger> ledger;
  const std::vector<AnyArray> arrays;
  const Footprint footprint;
  const int threads;
  AdamW adamw;
  const Pinner pinner;
  Buffer staging;  // the ring; between two steps, whatever else is on its way

  // Errors as AdamW's; Python's signals are looked for on the calling thread.
  State(Written made, std::shared_ptr<Ledger> of, int slots, int count, const Pinner& pins);
  ~State();
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  // USAGE where there is none.
  const ShardSpec& shard(size_t index) const;
  // `adamw`; UNSUPPORTED in a process that was forked without the state or without the parameters.
  AdamW& here();
};

// New parameters on their way into Python's hands, which must outlive it. The first error is kept,
// and nothing is sent after it.
class Sending {
 public:
  Sending(State& state, const nb::object& send, const nb::object& wait, const std::string& dtype);
  Sending(const Sending&) = delete;
  Sending& operator=(const Sending&) = delete;

  const Outlet& outlet() const noexcept { return outlet_; }
  void require_sent() const;  // else the error

 private:
  template <typename Call>
  void call(Call&& of) noexcept;

  Outlet outlet_;
  std::exception_ptr error_;  // written with the lock
};

}  // namespace modicum::python
