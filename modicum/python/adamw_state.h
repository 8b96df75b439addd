// AdamW's state and the Python objects that its memory depends on. Internal to `python`.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "modicum/memory/memory.h"
#include "modicum/optim/optim.h"
#include "modicum/python/arrays.h"
#include "modicum/python/bindings.h"

namespace modicum::python {

// A shard as Python passes it. The documentation of the members is that of `AdamWShard` (optim.cc).
struct PythonShard {
  std::string fqn;
  std::vector<int64_t> shape;
  std::vector<std::pair<int64_t, int64_t>> runs;
  int group = 0;
  nb::object master;
  nb::object out;
};

// The shards, and the arrays that own the memory of masters and outputs.
struct ShardsFromPython {
  AdamWSpec spec;
  std::vector<AnyArray> arrays;
};

// Converts shards from Python. Throws USAGE for an unknown `format`. The errors about a `master` or
// `out` name the parameter: USAGE unless it is a writable contiguous host array; MISMATCH if its
// size is not the shard's, or the master's dtype not the format's; UNSUPPORTED for dtypes other
// than float32, bfloat16 and float16, and for a float32 `out`.
ShardsFromPython written(const std::vector<PythonShard>& shards,
                         const std::vector<AdamOptions>& groups, const std::string& format,
                         uint64_t seed);

// Throws UNSUPPORTED unless the array is float32, bfloat16 or float16.
DType dtype_of(const AnyArray& array, const std::string& fqn);

// A Pinner that calls `pin` and `unpin` with address and bytes, with the GIL. Empty if `pin` is
// None. `limit`: the bytes that may be pinned; empty: any number.
Pinner pinner_of(const nb::object& pin, const nb::object& unpin,
                 const std::optional<uint64_t>& limit);

// The charges of a State: those of AdamW, and `slots` ring slots per thread.
Footprint footprint_of(const AdamWSpec& spec, int slots, int threads);

// AdamW in Python, with the owners of its memory.
struct State {
  const std::shared_ptr<Ledger> ledger;
  const std::vector<AnyArray> arrays;
  const Footprint footprint;
  const int threads;
  AdamW adamw;
  const Pinner pinner;
  Buffer staging;  // the ring of a step; between steps, gradients in flight use it

  // `count`: threads. Throws the errors of AdamW's constructor. Runs Python's signal handlers on
  // the calling thread, and throws the exception that one raises.
  State(ShardsFromPython converted, std::shared_ptr<Ledger> shared_ledger, int slots, int count,
        const Pinner& pins);
  ~State();
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  // Throws USAGE if there is no such shard.
  const ShardSpec& shard(size_t index) const;
  // Returns `adamw`. Throws UNSUPPORTED in a process that was forked without the memory of the
  // state or of a parameter. Every call that reads or writes that memory uses it.
  AdamW& here();
};

// An Outlet that calls the Python functions `send` and `wait`, which must outlive it, on the
// threads of a step, with the GIL. After the first call that raises, it keeps the error and makes
// no more calls.
class PythonOutlet {
 public:
  PythonOutlet(State& state, const nb::object& send, const nb::object& wait,
               const std::string& dtype);
  PythonOutlet(const PythonOutlet&) = delete;
  PythonOutlet& operator=(const PythonOutlet&) = delete;

  const Outlet& outlet() const noexcept { return outlet_; }
  void require_sent() const;  // throws the first error

 private:
  template <typename Call>
  void call(Call&& function) noexcept;

  Outlet outlet_;
  std::exception_ptr error_;  // guarded by the GIL
};

}  // namespace modicum::python
