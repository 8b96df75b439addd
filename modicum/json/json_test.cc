#include "modicum/json/json.h"

#include <gtest/gtest.h>
#include <simdjson.h>

#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "modicum/base/base.h"

namespace modicum {
namespace {

using std::literals::operator""s;

// Reads every value by its kind and writes it again.
void copy(JsonValue& value, JsonWriter& out) {
  switch (value.kind()) {
    case JsonValue::Kind::object:
      out.begin_object();
      value.object([&](std::string_view key, JsonValue& member) {
        out.key(key);
        copy(member, out);
      });
      out.end_object();
      return;
    case JsonValue::Kind::array:
      out.begin_array();
      value.array([&](JsonValue& element) { copy(element, out); });
      out.end_array();
      return;
    case JsonValue::Kind::string: out.value(value.string()); return;
    case JsonValue::Kind::number: out.value(value.number()); return;
    case JsonValue::Kind::boolean: out.value(value.boolean()); return;
    case JsonValue::Kind::null:
      value.null();
      out.null();
      return;
  }
}

std::string copied(std::string_view text) {
  JsonWriter out;
  read_json(text, [&](JsonValue& root) { copy(root, out); });
  return out.text();
}

std::optional<JsonError> fault_of(std::string_view text) {
  try {
    read_json(text, [](JsonValue&) {});
  } catch (const JsonError& error) {
    return error;
  }
  return std::nullopt;
}

TEST(Json, EveryKindOfValueIsRead) {
  EXPECT_EQ(copied(R"( {"a":[1,-2.5,1e3,true,false,null,"x"],"b":{},"c":[]} )"),
            R"({"a":[1,-2.5,1000,true,false,null,"x"],"b":{},"c":[]})");
  EXPECT_EQ(copied("7"), "7");
  EXPECT_EQ(copied("\t\r\n \"s\" "), "\"s\"");
  EXPECT_EQ(copied("-0"), "-0");
}

TEST(Json, EscapesAreDecoded) {
  std::string text;
  read_json(R"("\"\\\/\b\f\n\r\t\u0041\u00e9\u20ac\ud83d\ude00\u0000z")",
            [&](JsonValue& root) { text = root.string(); });
  EXPECT_EQ(text, "\"\\/\b\f\n\r\tA\u00e9\u20ac\U0001f600\0z"s);
}

struct InvalidText {
  std::string text;
  JsonFault fault;
  uint64_t offset;
};

TEST(Json, EveryMalformedTextHasItsFaultAndOffset) {
  using enum JsonFault;
  const std::vector<InvalidText> cases = {
      {"", syntax, 0},
      {"  ", syntax, 2},
      {"{", syntax, 1},
      {"[", syntax, 1},
      {"]", syntax, 0},
      {"[}", syntax, 1},
      {"{]", syntax, 1},
      {"[1,]", syntax, 3},
      {"[1 2]", syntax, 3},
      {"[1}", syntax, 2},
      {"[,1]", syntax, 1},
      {"{\"a\"}", syntax, 4},
      {"{\"a\":}", syntax, 5},
      {"{\"a\":1,}", syntax, 7},
      {"{\"a\":1 \"b\":2}", syntax, 7},
      {"{\"a\" 1}", syntax, 5},
      {"{a:1}", syntax, 1},
      {"{1:1}", syntax, 1},
      {"{'a':1}", syntax, 1},
      {"tru", syntax, 0},
      {"nul", syntax, 0},
      {"nan", syntax, 0},
      {"NaN", syntax, 0},
      {"Infinity", syntax, 0},
      {"True", syntax, 0},
      {"01", syntax, 1},
      {"-", syntax, 1},
      {"-01", syntax, 2},
      {"+1", syntax, 0},
      {".5", syntax, 0},
      {"1.", syntax, 2},
      {"1.e3", syntax, 2},
      {"1e", syntax, 2},
      {"1e+", syntax, 3},
      {"\"abc", syntax, 0},
      {"\"abc\\", syntax, 4},
      {"\"abc\\\"", syntax, 0},
      {"\"\\x\"", syntax, 1},
      {"\"\\u12\"", syntax, 1},
      {"\"\\u12g4\"", syntax, 1},
      {"\"\\u-123\"", syntax, 1},
      {"\"\\ud800\"", syntax, 1},
      {"\"\\udc00\"", syntax, 1},
      {"\"\\ud800\\u0041\"", syntax, 1},
      {"\"\\ud800\\n\"", syntax, 1},
      {"\"a\nb\"", syntax, 2},
      {"\"a\0b\""s, syntax, 2},
      {"\xEF\xBB\xBF{}", syntax, 0},
      {"/**/1", syntax, 0},
      {"{}\0"s, trailing, 2},
      {"{} {}", trailing, 3},
      {"1 2", trailing, 2},
      {"1]", trailing, 1},
      {"truex", trailing, 4},
      {"[1]]", trailing, 3},
      {"{\"a\":1,\"b\":2,\"a\":3}", duplicate, 13},
      {"{\"a\":1,\"\\u0061\":3}", duplicate, 7},
      {"[{\"k\":{\"\":1,\"\":2}}]", duplicate, 12},
      {"[\"\xff\"]", utf8, 2},
      {"[\"a\xc0\x80\"]", utf8, 3},            // overlong form
      {"[\"\xed\xa0\x80\"]", utf8, 2},         // surrogate
      {"[\"\xf4\x90\x80\x80\"]", utf8, 2},     // over U+10FFFF
      {"[\"\u20ac\xe2\x82\"]", utf8, 5},       // truncated character
      {"{\"a\":1,\"a\":\"\x80\"}", utf8, 12},  // found before the duplicate key
  };
  for (const InvalidText& bad : cases) {
    const auto error = fault_of(bad.text);
    ASSERT_TRUE(error.has_value()) << bad.text;
    EXPECT_EQ(static_cast<int>(error->fault), static_cast<int>(bad.fault))
        << bad.text << ": " << error->what();
    EXPECT_EQ(error->offset, bad.offset) << bad.text << ": " << error->what();
  }
}

TEST(Json, DifferentObjectsMayHaveTheSameKey) {
  EXPECT_FALSE(fault_of(R"({"a":{"a":{"a":1}},"b":[{"a":1},{"a":2}]})"));
}

TEST(Json, DuplicatesAreFoundAmongManyKeys) {
  std::string text = "{";
  for (int i = 0; i < 5000; ++i) text += "\"k" + std::to_string(i) + "\":{\"x\":0},";
  EXPECT_FALSE(fault_of(text + "\"last\":0}"));
  const auto error = fault_of(text + "\"k2\\u0034\":0}");
  ASSERT_TRUE(error);
  EXPECT_EQ(error->fault, JsonFault::duplicate);
  EXPECT_EQ(error->offset, text.size());
}

TEST(Json, NestingIsLimitedTo64) {
  EXPECT_FALSE(fault_of(std::string(64, '[') + std::string(64, ']')));
  const auto error = fault_of(std::string(65, '[') + std::string(65, ']'));
  ASSERT_TRUE(error);
  EXPECT_EQ(error->fault, JsonFault::syntax);
  EXPECT_EQ(error->offset, 64U);
  EXPECT_TRUE(fault_of(std::string(1000000, '[')));
}

TEST(Json, IntegersAreReadAsWritten) {
  auto integer = [](std::string_view text) {
    int64_t number = -1;
    read_json(text, [&](JsonValue& root) { number = root.integer(); });
    return number;
  };
  EXPECT_EQ(integer("0"), 0);
  EXPECT_EQ(integer("9223372036854775807"), std::numeric_limits<int64_t>::max());
  for (const char* text : {"-0", "-1", "1.0", "1e3", "0.0", "9223372036854775808",
                           "18446744073709551616", "99999999999999999999999999"}) {
    try {
      integer(text);
      FAIL() << text;
    } catch (const JsonError& error) {
      EXPECT_EQ(error.fault, JsonFault::range) << text;
      EXPECT_EQ(error.offset, 0U);
    }
  }
}

TEST(Json, ReadingContinuesAfterATypeOrRangeFault) {
  std::vector<std::string> seen;
  read_json(R"({"a":"x","b":1.5,"c":[{}],"d":7})", [&](JsonValue& root) {
    root.object([&](std::string_view key, JsonValue& value) {
      try {
        seen.push_back(std::string(key) + std::to_string(value.integer()));
      } catch (const JsonError& error) {
        seen.push_back(error.fault == JsonFault::type ? "type" : "range");
      }
    });
  });
  EXPECT_EQ(seen, (std::vector<std::string>{"type", "range", "type", "d7"}));
}

TEST(Json, AValueIsTakenOnce) {
  read_json("1", [](JsonValue& root) {
    root.integer();
    EXPECT_THROW(root.integer(), Error);
  });
}

TEST(Json, ValuesReportTheirOffset) {
  std::vector<uint64_t> offsets;
  read_json(R"( { "a" : [ 10 , "x" ] } )", [&](JsonValue& root) {
    offsets.push_back(root.offset());
    root.object([&](std::string_view, JsonValue& member) {
      offsets.push_back(member.offset());
      member.array([&](JsonValue& element) { offsets.push_back(element.offset()); });
    });
  });
  EXPECT_EQ(offsets, (std::vector<uint64_t>{1, 9, 11, 16}));
}

TEST(Json, RereadingGivesTheSameValues) {
  const std::string text = R"({"\u0061":[1,2],"b":{"c":null}})";
  JsonWriter again;
  reread_json(text, [&](JsonValue& root) { copy(root, again); });
  EXPECT_EQ(again.text(), copied(text));
  EXPECT_THROW(reread_json("[1,", [](JsonValue&) {}), JsonError);
}

// The oracle: simdjson's parser must accept every text that we accept.
bool simdjson_accepts(const std::string& text) {
  simdjson::dom::parser parser;
  return parser.parse(simdjson::padded_string(text)).error() == simdjson::SUCCESS;
}

TEST(Json, MutatedTextsAreAcceptedOnlyIfTheOracleAcceptsThem) {
  const std::string seed =
      R"({"n\u00e9":[0,12,-1.5e+3],"m":{"x":"a\\\"b\u20ac","y":[true,false,null]},"z":"é€😀"})";
  ASSERT_TRUE(simdjson_accepts(seed));
  ASSERT_FALSE(fault_of(seed));
  int accepted = 0;
  auto check = [&](const std::string& text) {
    if (fault_of(text)) return;
    ++accepted;
    EXPECT_TRUE(simdjson_accepts(text)) << text;
  };
  for (size_t length = 0; length < seed.size(); ++length) {
    EXPECT_TRUE(fault_of(seed.substr(0, length))) << length;
  }
  for (size_t at = 0; at < seed.size(); ++at) {
    for (int byte = 0; byte < 256; ++byte) {
      std::string text = seed;
      text[at] = static_cast<char>(byte);
      check(text);
    }
  }
  std::mt19937 random(1);
  const std::string alphabet = "{}[]:,\"\\u tfn-+.eE\n";
  for (int i = 0; i < 20000; ++i) {
    std::string text = seed;
    for (int edits = 0; edits < 3; ++edits) {
      const size_t at = random() % text.size();
      const char byte = alphabet[random() % alphabet.size()];
      if (random() % 2 == 0) {
        text.insert(at, 1, byte);
      } else {
        text.erase(at, 1);
      }
    }
    check(text);
  }
  EXPECT_GT(accepted, 1000);
}

TEST(Json, TheWriterAddsCommasAndEscapes) {
  JsonWriter out;
  out.begin_object().member("a", 1).member("b", "x\"\\\n\x01").key("c").begin_array();
  out.value(uint64_t{18446744073709551615U}).value(int64_t{-5}).value(true).null();
  out.begin_object().end_object().begin_array().end_array().value(0.1).end_array();
  out.member("d", 1e300).member("e", std::numeric_limits<double>::infinity()).end_object();
  EXPECT_EQ(out.text(),
            R"({"a":1,"b":"x\"\\\n\u0001","c":[18446744073709551615,-5,true,null,{},[],0.1],)"
            R"("d":1e+300,"e":null})");
}

TEST(Json, TheWriterReplacesInvalidUtf8) {
  JsonWriter out;
  out.value(std::string("a\xff\u20ac\xc3\n"));
  EXPECT_EQ(out.text(), "\"a\uFFFD\u20ac\uFFFD\\n\"");
  EXPECT_FALSE(fault_of(out.text()));
}

TEST(Json, TheWriterRefusesMisuse) {
  EXPECT_THROW(JsonWriter().begin_object().value(1), Error);
  EXPECT_THROW(JsonWriter().begin_array().key("a"), Error);
  EXPECT_THROW(JsonWriter().key("a"), Error);
  EXPECT_THROW(JsonWriter().value(1).value(2), Error);
  EXPECT_THROW(JsonWriter().begin_array().end_object(), Error);
  EXPECT_THROW(JsonWriter().begin_object().key("a").end_object(), Error);
  EXPECT_THROW(JsonWriter().end_array(), Error);
}

}  // namespace
}  // namespace modicum
