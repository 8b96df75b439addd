// A command that watches itself for --report. Internal to `cli`.
#pragma once

#include <string>
#include <string_view>

#include "modicum/cli/verbs.h"

namespace modicum {

constexpr std::string_view kReportHelp =
    "run under `modicum watch`, and write memory over time by owner as an HTML file";
// Becomes `modicum watch --report REPORT -- modicum VERB ARGS`, ARGS without --report: one way only
// to record a run. IO if the page could not be written, or the program can't be started again.
[[noreturn]] void watch_instead(std::string_view verb, const Args& args, const std::string& report);

}  // namespace modicum
