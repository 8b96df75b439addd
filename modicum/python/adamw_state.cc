#include "modicum/python/adamw_state.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <thread>
#include <utility>

#include "modicum/base/base.h"

namespace modicum::python {
namespace {

void require_numel(const AnyArray& array, int64_t numel, const std::string& fqn) {
  const auto got = static_cast<int64_t>(array.size());
  if (got == numel) return;
  fail(Category::mismatch, "an array's size differs from its shard's",
       {.tensor = fqn, .expected = std::to_string(numel), .got = std::to_string(got)});
}

uint64_t staging_bytes(int slots, int threads) noexcept {
  return static_cast<uint64_t>(slots) * static_cast<uint64_t>(threads) * kRingSlotBytes;
}

// Returns `needed`. Throws BUDGET if the ledger has no room for it.
Footprint with_room_in(const Ledger& ledger, Footprint needed) {
  ledger.require_room(needed, "AdamW's state and its staging");
  return needed;
}

// Returns a Poll that runs Python's signal handlers, so that Ctrl-C cancels the construction of
// AdamW. The Poll does nothing on threads other than the caller of for_signals.
auto for_signals() {
  return [caller = std::this_thread::get_id()] {
    if (std::this_thread::get_id() != caller) return;
    const nb::gil_scoped_acquire acquired;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  };
}

// `pinner` with a limit that is lower by `bytes`.
Pinner but_for(uint64_t bytes, Pinner pinner) {
  pinner.limit_bytes -= std::min(bytes, pinner.limit_bytes);
  return pinner;
}

}  // namespace

DType dtype_of(const AnyArray& array, const std::string& fqn) {
  const nb::dlpack::dtype dtype = array.dtype();
  if (dtype == nb::dtype<float>()) return DType::f32;
  using Code = nb::dlpack::dtype_code;
  if (dtype.bits == 16 && dtype.code == static_cast<uint8_t>(Code::Bfloat)) return DType::bf16;
  if (dtype.bits == 16 && dtype.code == static_cast<uint8_t>(Code::Float)) return DType::f16;
  fail(Category::unsupported, "an array must be float32, bfloat16 or float16", {.tensor = fqn});
}

ShardsFromPython written(const std::vector<PythonShard>& shards,
                         const std::vector<AdamOptions>& groups, const std::string& format,
                         uint64_t seed) {
  const StateFormatRow& row = row_named("state format", format, all_state_formats());
  ShardsFromPython all{.spec = {.format = row.format, .groups = groups, .seed = seed}};
  const auto take = [&all](const nb::object& object, const ShardSpec& shard,
                           DType* dtype) -> std::byte* {
    if (object.is_none()) return nullptr;
    const AnyArray array = writable(object, shard.fqn);
    require_numel(array, shard.numel(), shard.fqn);
    *dtype = dtype_of(array, shard.fqn);
    all.arrays.push_back(array);
    return bytes_of_array(array).data();
  };
  for (const auto& [fqn, shape, runs, group, master, out] : shards) {
    ShardSpec shard{.fqn = fqn, .row = row.has_scales() ? moment_row(shape) : 0, .group = group};
    for (const auto& [first, n] : runs) shard.runs.push_back({first, n});
    DType dtype = row.master;
    shard.master = take(master, shard, &dtype);
    if (dtype != row.master) {
      fail(Category::mismatch, "the master's dtype differs from the format's",
           {.tensor = fqn,
            .expected = std::string(torch_name(row.master)),
            .got = std::string(torch_name(dtype))});
    }
    shard.out = take(out, shard, &shard.out_dtype);
    if (shard.out != nullptr && shard.out_dtype == DType::f32) {
      fail(Category::unsupported, "new parameters must be bfloat16 or float16", {.tensor = fqn});
    }
    all.spec.shards.push_back(std::move(shard));
  }
  return all;
}

Pinner pinner_of(const nb::object& pin, const nb::object& unpin,
                 const std::optional<uint64_t>& limit) {
  Pinner pinner;
  if (pin.is_none()) return pinner;
  const auto calling = [](nb::object function) {
    // The State may copy and destroy the function on threads that do not hold the GIL.
    const std::shared_ptr<nb::object> callback(new nb::object(std::move(function)),
                                               [](nb::object* o) {
                                                 const nb::gil_scoped_acquire acquired;
                                                 delete o;
                                               });
    return [callback](std::span<std::byte> arena) {
      const nb::gil_scoped_acquire acquired;
      (*callback)(reinterpret_cast<uintptr_t>(arena.data()), arena.size());
    };
  };
  pinner.pin = calling(pin);
  pinner.unpin = [call = calling(unpin)](std::span<std::byte> arena) {
    try {
      call(arena);
    } catch (nb::python_error& error) {
      const nb::gil_scoped_acquire acquired;
      error.discard_as_unraisable("modicum: can't unpin memory");
    }
  };
  pinner.limit_bytes = limit.value_or(UINT64_MAX);
  return pinner;
}

Footprint footprint_of(const AdamWSpec& spec, int slots, int threads) {
  Footprint footprint = adamw_footprint(spec);
  footprint[Purpose::staging] += staging_bytes(slots, threads);
  return footprint;
}

State::State(ShardsFromPython converted, std::shared_ptr<Ledger> shared_ledger, int slots,
             int count, const Pinner& pins)
    : ledger(std::move(shared_ledger)),
      arrays(std::move(converted.arrays)),
      footprint(with_room_in(*ledger, footprint_of(converted.spec, slots, count))),
      threads(count),
      adamw(std::move(converted.spec), *ledger, count, but_for(staging_bytes(slots, count), pins),
            for_signals()),
      pinner(pins),
      staging(ledger->charge(Purpose::staging, staging_bytes(slots, count))) {
  if (pinner.pin && !staging.empty()) pinner.pin(staging.bytes());
}

State::~State() {
  if (pinner.pin && !staging.empty()) pinner.unpin(staging.bytes());
}

const ShardSpec& State::shard(size_t index) const {
  if (index < adamw.shards()) return adamw.shard(index);
  fail(Category::usage, fmt::format("there is no shard {} of {}", index, adamw.shards()));
}

AdamW& State::here() {
  if (!has_exclusions_here()) return adamw;
  for (size_t index = 0; index < adamw.shards(); ++index) {
    const std::array<const std::byte*, 3> memory = {adamw.plane(index, Plane::exp_avg).data(),
                                                    adamw.plane(index, Plane::master).data(),
                                                    adamw.shard(index).out};
    if (std::none_of(memory.begin(), memory.end(), is_excluded_here)) continue;
    fail(Category::unsupported,
         "this process was forked without the memory of the optimizer or of its parameter "
         "(fork=\"excluded\"); make AdamW, and load the parameters, with fork=\"shared\" to use "
         "them in forked children",
         {.tensor = adamw.shard(index).fqn});
  }
  return adamw;
}

template <typename Call>
void PythonOutlet::call(Call&& function) noexcept {
  const nb::gil_scoped_acquire acquired;
  if (error_) return;
  try {
    function();
  } catch (...) {
    error_ = std::current_exception();
  }
}

PythonOutlet::PythonOutlet(State& state, const nb::object& send, const nb::object& wait,
                           const std::string& dtype) {
  const std::optional<DType> outlet_dtype = dtype_from_torch_name(dtype);
  if (outlet_dtype != DType::bf16 && outlet_dtype != DType::f16) {
    fail(Category::unsupported, "new parameters must be bfloat16 or float16",
         {.got = printable(dtype)});
  }
  outlet_.dtype = *outlet_dtype;
  outlet_.ring = state.staging.bytes();
  outlet_.send = [this, &send](const ReadyChunk& chunk) {
    call([&] { send(chunk.shard, chunk.at, chunk.n, chunk.slot); });
  };
  if (wait.is_none()) return;
  outlet_.wait = [this, &wait](int slot) { call([&] { wait(slot); }); };
}

void PythonOutlet::require_sent() const {
  if (error_) std::rethrow_exception(error_);
}

}  // namespace modicum::python
