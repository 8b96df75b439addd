// `load` and `rehearse` with --report start again under `modicum watch`. Internal to `cli`.
#pragma once

#include <string>
#include <string_view>

#include "modicum/cli/verbs.h"

namespace modicum {

constexpr std::string_view kReportHelp =
    "an HTML file: memory over time by owner (runs under `modicum watch`)";
// Replaces this process with `modicum watch --quiet --report REPORT -- modicum VERB ARGS`, since
// `watch` records memory over time. If that process is killed, VERB ends too. ARGS is `args`
// without --report. Throws IO if REPORT can't be written, or if exec fails.
[[noreturn]] void watch_instead(std::string_view verb, const Args& args, const std::string& report,
                                FileSystem& files);

}  // namespace modicum
