#include "store/redis/redis_script.h"

#include <string>

#include "gtest/gtest.h"

namespace ddp::store {
namespace {

// Examples of FIPS 180.
TEST(RedisScriptTest, NameIsTheSha1OfTheSource) {
  EXPECT_EQ(RedisScript("").sha1_hex(), "da39a3ee5e6b4b0d3255bfef95601890afd80709");
  EXPECT_EQ(RedisScript("abc").sha1_hex(), "a9993e364706816aba3e25717850c26c9cd0d89d");
  EXPECT_EQ(RedisScript("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq").sha1_hex(),
            "84983e441c3bd26ebaae4aa1f95129e5e54670f1");
  EXPECT_EQ(RedisScript(std::string(1'000'000, 'a')).sha1_hex(),
            "34aa973cd4c4daa4f61eeb2bdbad27316534016f");
}

// The padding takes a second block from 56 bytes on; redis-server agrees in redis_connection_test.
TEST(RedisScriptTest, EveryLengthAroundABlockHasItsOwnName) {
  std::string last;
  for (size_t size = 50; size < 130; ++size) {
    const RedisScript script(std::string(size, 'x'));
    EXPECT_EQ(script.sha1_hex().size(), 40);
    EXPECT_NE(script.sha1_hex(), last);
    last = script.sha1_hex();
  }
}

}  // namespace
}  // namespace ddp::store
