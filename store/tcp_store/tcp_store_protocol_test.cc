#include "store/tcp_store/tcp_store_protocol.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace ddp::store {
namespace {

using Requests = std::vector<TcpStoreRequest>;

std::string Bytes(TcpStoreQuery query) { return std::string(1, static_cast<char>(query)); }

std::string Number(int64_t number) {
  std::string out;
  AppendNumber(out, number);
  return out;
}

std::string Text(const std::string& text) {
  std::string out;
  AppendString(out, text);
  return out;
}

// Returns every request that LibTorch's client sends, in one stream.
std::string Stream() {
  return TcpStoreGreeting(0x01020304) +                                                //
         Bytes(TcpStoreQuery::kSet) + Text("/k") + Text("value") +                     //
         Bytes(TcpStoreQuery::kCompareSet) + Text("/k") + Text("old") + Text("new") +  //
         Bytes(TcpStoreQuery::kGet) + Text("/k") +                                     //
         Bytes(TcpStoreQuery::kAdd) + Text("/n") + Number(-7) +                        //
         Bytes(TcpStoreQuery::kCheck) + Number(0) +                                    //
         Bytes(TcpStoreQuery::kWait) + Number(2) + Text("/a") + Text("") +             //
         Bytes(TcpStoreQuery::kKeyCount) +                                             //
         Bytes(TcpStoreQuery::kDelete) + Text("/k") +                                  //
         Bytes(TcpStoreQuery::kAppend) + Text("/k") + Text("more") +                   //
         Bytes(TcpStoreQuery::kMultiGet) + Number(3) + Text("/a") + Text("/b") + Text("/a") +
         Bytes(TcpStoreQuery::kMultiSet) + Number(2) + Text("/a") + Text("1") + Text("/b") +
         Text("22") +                                                 //
         Bytes(TcpStoreQuery::kMultiSet) + Number(0) +                //
         Bytes(TcpStoreQuery::kCancelWait) +                          //
         Bytes(TcpStoreQuery::kQueuePush) + Text("/q") + Text("e") +  //
         Bytes(TcpStoreQuery::kQueuePop) + Text("/q") +               //
         Bytes(TcpStoreQuery::kQueueLength) + Text("/q") +            //
         Bytes(TcpStoreQuery::kListKeys);
}

std::string Describe(const TcpStoreRequest& request) {
  std::string text = std::to_string(static_cast<int>(request.query));
  for (const std::string& key : request.keys) text += " " + key;
  for (const std::string& value : request.values) text += " =" + value;
  if (request.number != 0) text += " #" + std::to_string(request.number);
  return text;
}

std::string DescribeAll(const Requests& requests) {
  std::string text;
  for (const TcpStoreRequest& request : requests) text += Describe(request) + "\n";
  return text;
}

// Returns the requests in `stream`, parsed in pieces of the sizes that `next_size` returns.
template <typename Sizes>
absl::StatusOr<Requests> Parse(const std::string& stream, Sizes next_size,
                               const TcpStoreLimits& limits = {}) {
  TcpStoreParser parser(&limits);
  Requests requests;
  for (size_t at = 0; at < stream.size();) {
    const size_t size = std::min<size_t>(next_size(), stream.size() - at);
    parser.Append(stream.data() + at, size);
    at += size;
    while (true) {
      absl::StatusOr<std::optional<TcpStoreRequest>> request = parser.Next();
      if (!request.ok()) return request.status();
      if (!request->has_value()) break;
      requests.push_back(**std::move(request));
    }
  }
  return requests;
}

absl::StatusOr<Requests> ParseWhole(const std::string& stream, const TcpStoreLimits& limits = {}) {
  return Parse(
      stream, [&] { return stream.size(); }, limits);
}

TEST(TcpStoreProtocolTest, GreetingIsWhatLibTorchSends) {
  EXPECT_EQ(TcpStoreGreeting(0x000044dc),
            std::string("\x00\xce\xf7\x85\x3c\x0d\xdc\x44\x00\x00", 10));
}

TEST(TcpStoreProtocolTest, ReadsEveryRequest) {
  const auto requests = ParseWhole(Stream());
  ASSERT_TRUE(requests.ok()) << requests.status();
  EXPECT_EQ(
      DescribeAll(*requests),
      "0 #1015412686\n13 #16909060\n1 /k =value\n2 /k =old =new\n3 /k\n4 /n #-7\n5\n6 /a \n7\n"
      "8 /k\n9 /k =more\n10 /a /b /a\n11 /a /b =1 =22\n11\n12\n14 /q =e\n15 /q\n16 /q\n17\n");
}

TEST(TcpStoreProtocolTest, PiecesOfAnySizeAreTheSame) {
  const std::string stream = Stream();
  const std::string whole = DescribeAll(*ParseWhole(stream));
  for (size_t size = 1; size < 40; ++size) {
    const auto requests = Parse(stream, [&] { return size; });
    ASSERT_TRUE(requests.ok()) << size << ": " << requests.status();
    EXPECT_EQ(DescribeAll(*requests), whole) << size;
  }
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    const auto requests = Parse(stream, [&] { return 1 + random() % 100; });
    ASSERT_TRUE(requests.ok()) << round;
    EXPECT_EQ(DescribeAll(*requests), whole) << round;
  }
}

TEST(TcpStoreProtocolTest, TruncatedStreamsAreUnfinishedNotWrong) {
  const std::string stream = Stream();
  for (size_t size = 0; size < stream.size(); ++size) {
    EXPECT_TRUE(ParseWhole(stream.substr(0, size)).ok()) << size;
  }
}

TEST(TcpStoreProtocolTest, RefusesWhatIsBeyondTheLimits) {
  const TcpStoreLimits limits = {.max_key_bytes = 8,
                                 .max_value_bytes = 16,
                                 .max_keys_per_request = 4,
                                 .max_buffered_bytes = 600};
  const std::string set = Bytes(TcpStoreQuery::kSet);
  const std::string wait = Bytes(TcpStoreQuery::kWait);
  EXPECT_TRUE(ParseWhole(set + Text("12345678") + Text("1234567890123456"), limits).ok());
  for (const std::string& bad : {
           set + Text("123456789"),
           set + Text("k") + Text("12345678901234567"),
           set + Number(-1),
           set + Text("k") + Number(INT64_MAX),
           wait + Number(5),
           wait + Number(-1),
           // Each field is within the limits, but all fields together are not.
           Bytes(TcpStoreQuery::kMultiSet) + Number(4) + Text("a") + Text("1") + Text("b") +
               Text("1") + Text("c") + Text("1") + Text("d") + Text("1"),
           std::string(1, 18),
           std::string(1, '\xff'),
       }) {
    const auto requests = ParseWhole(bad, limits);
    EXPECT_TRUE(absl::IsInvalidArgument(requests.status())) << requests.status();
  }
}

TEST(TcpStoreProtocolTest, AnnouncedBytesAreNotReserved) {
  const TcpStoreLimits limits;
  TcpStoreParser parser(&limits);
  const std::string start = Bytes(TcpStoreQuery::kSet) + Text("k") + Number(60 << 20) + "abc";
  parser.Append(start.data(), start.size());
  ASSERT_FALSE((*parser.Next()).has_value());
  EXPECT_LT(parser.held_bytes(), 4096u);
}

TEST(TcpStoreProtocolTest, HoldsNothingBetweenRequests) {
  const TcpStoreLimits limits;
  TcpStoreParser parser(&limits);
  const std::string stream = Stream();
  for (int round = 0; round < 1000; ++round) {
    parser.Append(stream.data(), stream.size());
    while ((*parser.Next()).has_value()) {
    }
    ASSERT_LT(parser.held_bytes(), 2 * stream.size());
  }
}

TEST(TcpStoreProtocolTest, SurvivesRandomBytes) {
  const TcpStoreLimits limits = {.max_key_bytes = 64, .max_value_bytes = 256};
  std::mt19937 random(7);
  for (int round = 0; round < 3000; ++round) {
    std::string noise = Stream();
    const int changes = 1 + static_cast<int>(random() % 20);
    for (int i = 0; i < changes; ++i) noise[random() % noise.size()] = static_cast<char>(random());
    if (round % 3 == 0) {
      for (char& byte : noise) byte = static_cast<char>(random() % 24);
    }
    const auto whole = ParseWhole(noise, limits);
    const auto pieces = Parse(
        noise, [&] { return 1 + random() % 30; }, limits);
    EXPECT_EQ(whole.status(), pieces.status());
    if (whole.ok()) {
      EXPECT_EQ(DescribeAll(*whole), DescribeAll(*pieces));
    }
  }
}

}  // namespace
}  // namespace ddp::store
