// Arrays that cross between C++ and Python without a copy. Internal to `python`.
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

// An array that shares the memory of `array`, never of a copy. Throws USAGE, which names the
// tensor, if the memory is read-only or `array` is no contiguous host array.
AnyArray writable(nb::handle array, const std::string& fqn);

// Throws USAGE unless `index`, for which the caller gives memory, is below the number of targets.
void require_target(size_t index, size_t targets);

// `bytes` as a Python array. It owns `resource`, which is destroyed with the array's last view.
template <typename Resource>
nb::object array_of(std::unique_ptr<Resource> resource, std::span<std::byte> bytes) {
  const nb::capsule owner(resource.get(),
                          [](void* p) noexcept { delete static_cast<Resource*>(p); });
  resource.release();
  return nb::cast(Bytes(bytes.data(), {bytes.size()}, owner));
}

// A writable memoryview that owns nothing. Valid only during a call into Python.
nb::object view_of(std::span<std::byte> bytes);

nb::dict by_purpose(const Footprint& footprint);  // bytes by purpose, largest first
// Throws USAGE for an unknown purpose.
Footprint from_purposes(const std::map<std::string, uint64_t>& bytes);

}  // namespace modicum::python
