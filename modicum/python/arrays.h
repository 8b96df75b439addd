// Arrays that cross without a copy. Internal to `python`.
#pragma once

#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>

#include "modicum/python/bindings.h"

namespace modicum::python {

using Bytes = nb::ndarray<nb::array_api, uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using AnyArray = nb::ndarray<nb::c_contig, nb::device::cpu>;

inline std::span<std::byte> bytes_of_array(const AnyArray& array) noexcept {
  return {static_cast<std::byte*>(array.data()), array.nbytes()};
}

// The very memory of an array, never a copy that would be filled in its place. USAGE, naming the
// tensor, for what can't be written or is no contiguous host array.
AnyArray writable(nb::handle array, const std::string& fqn);

// Memory as Python sees it; `held` dies with the last view of it.
template <typename Held>
nb::object array_of(std::unique_ptr<Held> held, std::span<std::byte> bytes) {
  const nb::capsule owner(held.get(), [](void* p) noexcept { delete static_cast<Held*>(p); });
  held.release();
  return nb::cast(Bytes(bytes.data(), {bytes.size()}, owner));
}

// A memoryview, for the time of a call; keeps nothing alive.
nb::object view_of(std::span<std::byte> bytes);

nb::dict by_purpose(const Footprint& footprint);
Footprint from_purposes(const std::map<std::string, uint64_t>& bytes);

}  // namespace modicum::python
