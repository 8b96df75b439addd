// A non-owning reference to a callable, for callback parameters: two words, trivially copyable, no
// allocation. The callable must outlive the FunctionRef: don't store one beyond the call that
// received it, and don't initialise a variable of this type with a temporary lambda. To store a
// callback, use std::function. Threads: any from which the callable may be called.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>

#include "modicum/base/error.h"

namespace modicum {

template <typename Signature>
class FunctionRef;

template <typename R, typename... Args>
class FunctionRef<R(Args...)> {
 public:
  // Never null: nullptr does not compile, and a null function pointer throws INTERNAL.
  template <typename Callable>
  requires(!std::is_same_v<std::remove_cvref_t<Callable>, FunctionRef> &&
           std::is_invocable_r_v<R, Callable&, Args...>)
      FunctionRef(Callable&& callable)  // NOLINT(google-explicit-constructor): callers pass lambdas
      : callable_(address_of(callable)), call_(&call<std::remove_reference_t<Callable>>) {
    if constexpr (std::is_pointer_v<std::remove_cvref_t<Callable>>) {
      MODICUM_ASSERT(callable != nullptr);
    }
  }
  FunctionRef(std::nullptr_t) = delete;

  R operator()(Args... args) const { return call_(callable_, std::forward<Args>(args)...); }

 private:
  // POSIX allows a function pointer to be converted to void* and back.
  template <typename Callable>
  static void* address_of(Callable& callable) noexcept {
    if constexpr (std::is_function_v<Callable>) {
      return reinterpret_cast<void*>(&callable);
    } else {
      return const_cast<void*>(static_cast<const void*>(std::addressof(callable)));
    }
  }

  template <typename Callable>
  static R call(void* address, Args... args) {
    auto& callable = *reinterpret_cast<Callable*>(address);
    return static_cast<R>(std::invoke(callable, std::forward<Args>(args)...));
  }

  void* callable_;
  R (*call_)(void*, Args...);
};

}  // namespace modicum
