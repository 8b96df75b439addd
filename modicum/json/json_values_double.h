// JSON values of every type and of unusual sizes: a reader must accept each one at any key, or
// refuse it with an error of its own.
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
