// Free of LibTorch.
#ifndef DDP_COMM_MEETING_GROUP_STORE_H_
#define DDP_COMM_MEETING_GROUP_STORE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"

namespace ddp::internal {

// The keys and values that the ranks of a group share: the part of c10d::Store that meetings and
// reports need. MakeGroupStore() adapts a c10d::Store; testing/fake_group_store.h is a store in
// memory.
//
// Thread-safe. Every method throws an exception of the store when the store fails. A key exists
// from its first Set(), SetAll(), SetIfNew() or Add() on, until Delete().
class GroupStore {
 public:
  virtual ~GroupStore() = default;

  // Returns another store of the same keys. If the store can have several connections, the clone
  // may have one of its own. A thread that blocks in the clone does not block users of this store.
  virtual std::shared_ptr<GroupStore> Clone() = 0;

  // Sets the time limit of one command.
  virtual void SetTimeout(absl::Duration timeout) = 0;

  virtual void Set(const std::string& key, const std::string& value) = 0;

  // Sets all `keys` to `value`: by one command, where the store has such a command.
  virtual void SetAll(const std::vector<std::string>& keys, const std::string& value) = 0;

  // Sets `key` to `value` when the key does not exist. Returns the value that the key has then:
  // `value`, or an earlier one.
  virtual std::string SetIfNew(const std::string& key, const std::string& value) = 0;

  // Adds to the number at `key`, which begins at 0. Returns the sum.
  virtual int64_t Add(const std::string& key, int64_t value) = 0;

  // Returns true when all `keys` exist.
  virtual bool Has(const std::vector<std::string>& keys) = 0;

  // Return the values of keys, all of which must exist. GetAll() uses one command, where the store
  // has such a command.
  virtual std::string Get(const std::string& key) = 0;
  virtual std::vector<std::string> GetAll(const std::vector<std::string>& keys) = 0;

  // Returns the values of keys, with nullopt for a key that does not exist. Takes one command more
  // for each key when one is missing.
  std::vector<std::optional<std::string>> GetPresent(const std::vector<std::string>& keys);

  virtual void Delete(const std::string& key) = 0;

  // Blocks until `key` exists or `timeout` has passed. Returns false after `timeout`.
  virtual bool Wait(const std::string& key, absl::Duration timeout) = 0;
};

}  // namespace ddp::internal

#endif  // DDP_COMM_MEETING_GROUP_STORE_H_
