// JSON values of every type and of unusual sizes. At any key, a reader must either accept such a
// value or refuse it with an Error.
#pragma once

#include <array>

namespace modicum {

constexpr std::array<const char*, 26> kJsonValues = {"null",
                                                     "true",
                                                     "false",
                                                     "0",
                                                     "1",
                                                     "-1",
                                                     "128",
                                                     "1.5",
                                                     "1e400",
                                                     "-0",
                                                     "1e17",
                                                     "\"\"",
                                                     "\"auto\"",
                                                     "\"a.b\"",
                                                     "[]",
                                                     "[1, 2]",
                                                     "[0]",
                                                     "[-1, 2]",
                                                     "[null]",
                                                     "[[1], [2]]",
                                                     "[\"a\", \"b\"]",
                                                     "[1e400]",
                                                     "{}",
                                                     "9223372036854775808",
                                                     "{\"a\": true}",
                                                     "{\"a\": {\"b\": [{}]}}"};

}  // namespace modicum
