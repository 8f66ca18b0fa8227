#include "testing/simulator/redis/lua_redis.h"

#include <glog/logging.h>
#include <luajit-2.1/lua.hpp>

#include <cstdio>
#include <string_view>
#include <utility>

#include "absl/types/span.h"

namespace ddp::testing {
namespace {

using store::RedisReply;

class RedisReplySink final : public ReplySink {
 public:
  void Nil() override { Add(RedisReply()); }
  void Status(std::string_view text) override { Add(RedisReply::Status(std::string(text))); }
  void Error(std::string_view text) override { Add(RedisReply::Error(std::string(text))); }
  void String(std::string_view text) override { Add(RedisReply::String(std::string(text))); }
  void Integer(int64_t value) override { Add(RedisReply::Integer(value)); }
  void BeginArray(size_t size) override {
    is_array_ = true;
    elements_.reserve(size);
  }
  RedisReply Take() {
    return is_array_ ? RedisReply::Array(std::move(elements_)) : std::move(reply_);
  }

 private:
  void Add(RedisReply reply) {
    if (is_array_) {
      elements_.push_back(std::move(reply));
    } else {
      reply_ = std::move(reply);
    }
  }

  RedisReply reply_;
  bool is_array_ = false;
  std::vector<RedisReply> elements_;
};

void PushText(lua_State* lua, std::string_view text) {
  lua_pushlstring(lua, text.data(), text.size());
}

// Pushes a reply onto the Lua stack, as one value in the form that scripts see.
class LuaSink final : public ReplySink {
 public:
  explicit LuaSink(lua_State* lua) : lua_(lua) {}

  void Nil() override {
    lua_pushboolean(lua_, 0);
    Added();
  }
  void Status(std::string_view text) override { PushTable("ok", text); }
  void Error(std::string_view text) override {
    failed_ = true;
    PushTable("err", text);
  }
  void String(std::string_view text) override {
    PushText(lua_, text);
    Added();
  }
  void Integer(int64_t value) override {
    lua_pushnumber(lua_, static_cast<lua_Number>(value));
    Added();
  }
  void BeginArray(size_t size) override {
    lua_createtable(lua_, static_cast<int>(size), 0);
    next_index_ = 1;
  }
  void Refused(bool is_unknown, std::string_view) override {
    Error(is_unknown ? "ERR Unknown Redis command called from script"
                     : "ERR Wrong number of args calling Redis command from script");
  }

  bool failed() const { return failed_; }

 private:
  void PushTable(const char* field, std::string_view text) {
    lua_createtable(lua_, 0, 1);
    PushText(lua_, text);
    lua_setfield(lua_, -2, field);
    Added();
  }
  void Added() {
    if (next_index_ > 0) lua_rawseti(lua_, -2, next_index_++);
  }

  lua_State* const lua_;
  int next_index_ = 0;  // in the array, or 0 outside an array
  bool failed_ = false;
};

// State of the functions of the `redis` table.
struct Server {
  MemoryDatabase* database;
  const MemoryDatabase::World* world;
  std::vector<std::string_view> args;  // of the call in progress
};

Server& ServerOf(lua_State* lua) {
  return *static_cast<Server*>(lua_touserdata(lua, lua_upvalueindex(1)));
}

void PushError(lua_State* lua, std::string_view text) {
  lua_createtable(lua, 0, 1);
  PushText(lua, text);
  lua_setfield(lua, -2, "err");
}

// Runs the command and leaves the reply on the stack. Returns false when the reply is an error.
bool RunCommand(lua_State* lua) {
  Server& server = ServerOf(lua);
  const int count = lua_gettop(lua);
  if (count == 0) {
    PushError(lua, "ERR Please specify at least one argument for this redis.call()");
    return false;
  }
  server.args.resize(count);
  for (int i = 1; i <= count; ++i) {
    if (lua_type(lua, i) == LUA_TNUMBER) {
      char text[40];
      const int size = snprintf(text, sizeof(text), "%.17g", lua_tonumber(lua, i));
      lua_pushlstring(lua, text, size);
      lua_replace(lua, i);
    } else if (lua_type(lua, i) != LUA_TSTRING) {
      PushError(lua, "ERR Lua redis lib command arguments must be strings or integers");
      return false;
    }
    size_t size = 0;
    const char* const data = lua_tolstring(lua, i, &size);
    server.args[i - 1] = {data, size};
  }
  lua_checkstack(lua, 8);
  LuaSink sink(lua);
  server.database->Run(server.args, *server.world, sink);
  return !sink.failed();
}

// lua_error() jumps without running destructors, so this function has no objects with one.
int Call(lua_State* lua) {
  if (RunCommand(lua)) return 1;
  return lua_error(lua);
}

int ProtectedCall(lua_State* lua) {
  RunCommand(lua);
  return 1;
}

int ReplyTable(lua_State* lua, const char* field) {
  if (lua_gettop(lua) != 1 || lua_type(lua, 1) != LUA_TSTRING) {
    PushError(lua, "wrong number or type of arguments");
    return 1;
  }
  lua_createtable(lua, 0, 1);
  lua_pushvalue(lua, 1);
  lua_setfield(lua, -2, field);
  return 1;
}
int ErrorReply(lua_State* lua) { return ReplyTable(lua, "err"); }
int StatusReply(lua_State* lua) { return ReplyTable(lua, "ok"); }
int Log(lua_State*) { return 0; }

// Removes the parts of Lua that a Redis script does not have.
constexpr char kFences[] = R"lua(
  dofile, loadfile, require, module, print, newproxy = nil, nil, nil, nil, nil, nil
  io, os, package, debug, jit, ffi, coroutine = nil, nil, nil, nil, nil, nil, nil
  math.random, math.randomseed = nil, nil
  setmetatable(_G, {
    __newindex = function(_, name)
      error('Attempt to modify a readonly table: global ' .. tostring(name), 2)
    end,
    __index = function(_, name)
      error("Script attempted to access nonexistent global variable '" .. tostring(name) .. "'", 2)
    end,
  })
)lua";

void SetTexts(lua_State* lua, const char* name, const std::vector<std::string>& texts) {
  lua_pushstring(lua, name);
  lua_createtable(lua, static_cast<int>(texts.size()), 0);
  for (size_t i = 0; i < texts.size(); ++i) {
    PushText(lua, texts[i]);
    lua_rawseti(lua, -2, static_cast<int>(i + 1));
  }
  lua_rawset(lua, LUA_GLOBALSINDEX);
}

// Reads a field of the table at the top of the stack. Returns false when it is no string.
bool TextField(lua_State* lua, const char* field, std::string& text) {
  lua_pushstring(lua, field);
  lua_rawget(lua, -2);
  const bool is_text = lua_type(lua, -1) == LUA_TSTRING;
  if (is_text) {
    size_t size = 0;
    const char* const data = lua_tolstring(lua, -1, &size);
    text.assign(data, size);
  }
  lua_pop(lua, 1);
  return is_text;
}

constexpr int kDepthMax = 32;

// Pops the value at the top of the stack and converts it to a reply.
RedisReply PopReply(lua_State* lua, int depth) {
  RedisReply reply;
  switch (lua_type(lua, -1)) {
    case LUA_TSTRING: {
      size_t size = 0;
      const char* const data = lua_tolstring(lua, -1, &size);
      reply = RedisReply::String(std::string(data, size));
      break;
    }
    case LUA_TNUMBER:
      reply = RedisReply::Integer(static_cast<int64_t>(lua_tonumber(lua, -1)));
      break;
    case LUA_TBOOLEAN:
      if (lua_toboolean(lua, -1)) reply = RedisReply::Integer(1);
      break;
    case LUA_TTABLE: {
      std::string text;
      if (depth > kDepthMax) {
        reply = RedisReply::Error("ERR reached lua stack limit");
      } else if (TextField(lua, "err", text)) {
        reply = RedisReply::Error(text);
      } else if (TextField(lua, "ok", text)) {
        reply = RedisReply::Status(text);
      } else {
        std::vector<RedisReply> elements;
        lua_checkstack(lua, 4);
        for (int i = 1;; ++i) {
          lua_rawgeti(lua, -1, i);
          if (lua_isnil(lua, -1)) break;
          elements.push_back(PopReply(lua, depth + 1));
        }
        lua_pop(lua, 1);
        reply = RedisReply::Array(std::move(elements));
      }
      break;
    }
    default:
      break;
  }
  lua_pop(lua, 1);
  return reply;
}

}  // namespace

struct LuaRedis::Interpreter {
  Interpreter(MemoryDatabase* database, const MemoryDatabase::World* world)
      : server{database, world, {}}, lua(luaL_newstate()) {
    CHECK(lua != nullptr) << "no memory for a Lua interpreter";
    // Switches the JIT off: scripts spend their time in redis.call, which LuaJIT cannot compile.
    luaJIT_setmode(lua, 0, LUAJIT_MODE_ENGINE | LUAJIT_MODE_OFF);
    luaL_openlibs(lua);
    lua_newtable(lua);
    Add("call", Call);
    Add("pcall", ProtectedCall);
    Add("error_reply", ErrorReply);
    Add("status_reply", StatusReply);
    Add("log", Log);
    for (const char* level : {"LOG_DEBUG", "LOG_VERBOSE", "LOG_NOTICE", "LOG_WARNING"}) {
      lua_pushinteger(lua, 0);
      lua_setfield(lua, -2, level);
    }
    lua_setglobal(lua, "redis");
    CHECK_EQ(luaL_dostring(lua, kFences), 0) << lua_tostring(lua, -1);
  }
  ~Interpreter() { lua_close(lua); }
  Interpreter(const Interpreter&) = delete;
  Interpreter& operator=(const Interpreter&) = delete;

  void Add(const char* name, lua_CFunction function) {
    lua_pushlightuserdata(lua, &server);
    lua_pushcclosure(lua, function, 1);
    lua_setfield(lua, -2, name);
  }

  Server server;
  lua_State* const lua;
};

LuaRedis::LuaRedis(MemoryDatabase::World world)
    : world_(std::move(world)), interpreter_(std::make_unique<Interpreter>(&database_, &world_)) {}
LuaRedis::~LuaRedis() = default;

RedisReply LuaRedis::Command(const std::vector<std::string>& args) {
  CHECK(!args.empty()) << "a command has a name";
  const std::vector<std::string_view> views(args.begin(), args.end());
  RedisReplySink sink;
  database_.Run(views, world_, sink);
  return sink.Take();
}

int LuaRedis::FunctionOf(const store::RedisScript& script, std::string& error) {
  const auto found = functions_.find(script.sha1_hex());
  if (found != functions_.end()) return found->second;
  lua_State* const lua = interpreter_->lua;
  if (luaL_loadbuffer(lua, script.source().data(), script.source().size(), "@user_script") != 0) {
    error = lua_tostring(lua, -1);
    lua_pop(lua, 1);
    return LUA_NOREF;
  }
  const int function = luaL_ref(lua, LUA_REGISTRYINDEX);
  functions_.emplace(script.sha1_hex(), function);
  return function;
}

RedisReply LuaRedis::Eval(const store::RedisScript& script, const std::vector<std::string>& keys,
                          const std::vector<std::string>& args) {
  ++evals_;
  std::string error;
  const int function = FunctionOf(script, error);
  if (function == LUA_NOREF) {
    return RedisReply::Error("ERR Error compiling script (new function): " + error);
  }
  lua_State* const lua = interpreter_->lua;
  SetTexts(lua, "KEYS", keys);
  SetTexts(lua, "ARGV", args);
  lua_rawgeti(lua, LUA_REGISTRYINDEX, function);
  if (lua_pcall(lua, 0, 1, 0) == 0) return PopReply(lua, 0);
  // error() throws a string. A failed redis.call throws a table with the server's error.
  if (lua_type(lua, -1) == LUA_TTABLE) return PopReply(lua, 0);
  const char* const text = lua_tostring(lua, -1);
  RedisReply reply = RedisReply::Error(std::string("ERR ") + (text != nullptr ? text : "?"));
  lua_pop(lua, 1);
  return reply;
}

}  // namespace ddp::testing
