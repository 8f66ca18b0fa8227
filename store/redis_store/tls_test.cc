// A worker's store by TLS.
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "store/redis_store/redis_key_value_store.h"
#include "testing/redis/redis_fixture.h"
#include "testing/redis/tls_certificates.h"

namespace ddp::store {
namespace {

constexpr absl::Duration kLong = absl::Seconds(60);

TEST(StoreTlsTest, AWaiterWakesAndReadsALargeValue) {
  const ::ddp::testing::TlsCertificates certificates;
  const auto redis = ::ddp::testing::RedisFixture::StartTls(certificates);
  const auto open = [&] {
    auto store = RedisKeyValueStore::Connect(redis->Address(), {});
    EXPECT_TRUE(store.ok()) << store.status();
    return *std::move(store);
  };
  const auto store = open();
  std::thread waiter([&] { EXPECT_EQ(*store->Get("k", kLong), std::string(100'000, 'v')); });
  EXPECT_TRUE(open()->Set("k", std::string(100'000, 'v'), kLong).ok());
  waiter.join();
  EXPECT_EQ(*store->Add("n", 2, kLong), 2);
}

}  // namespace
}  // namespace ddp::store
