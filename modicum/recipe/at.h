#pragma once

#include <cstddef>
#include <cstdint>

namespace modicum {

// A dim, or an index along it, as an index of a vector.
inline size_t at(int64_t i) { return static_cast<size_t>(i); }

}  // namespace modicum
