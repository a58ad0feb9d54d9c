// SPDX-License-Identifier: Apache-2.0
// For wheels (LOWBIT_OLD_GLIBC): functions that the linker would bind to a new version of glibc, bound to the first
// version on x86-64, so that a library built here also loads on glibc 2.28 (manylinux_2_28). Hidden definitions precede
// those of glibc for everything linked in, the static libstdc++ too. The functions are the same: glibc 2.29 removed
// error handling from exp..pow, and 2.34 moved the others from libpthread and libdl.
#ifndef __x86_64__
#error "LOWBIT_OLD_GLIBC is for x86-64"
#endif

#define LOWBIT_FIRST_VERSION(name) LOWBIT_FIRST_VERSION_OF("2.2.5", name)
#define LOWBIT_FIRST_VERSION_OF(version, name) \
  __asm__(".symver first_" #name "," #name "@GLIBC_" version "\n" \
          ".pushsection .text\n" \
          ".globl " #name "\n.hidden " #name "\n.type " #name ",@function\n" \
          #name ": jmp *first_" #name "@GOTPCREL(%rip)\n" \
          ".popsection\n");

LOWBIT_FIRST_VERSION(exp)
LOWBIT_FIRST_VERSION(log)
LOWBIT_FIRST_VERSION(pow)
LOWBIT_FIRST_VERSION(exp2)
LOWBIT_FIRST_VERSION(log2)
LOWBIT_FIRST_VERSION(dladdr)
LOWBIT_FIRST_VERSION(dlclose)
LOWBIT_FIRST_VERSION(dlerror)
LOWBIT_FIRST_VERSION_OF("2.3.3", dlinfo)
LOWBIT_FIRST_VERSION(dlopen)
LOWBIT_FIRST_VERSION(dlsym)
LOWBIT_FIRST_VERSION(pthread_sigmask)
LOWBIT_FIRST_VERSION(sem_destroy)
LOWBIT_FIRST_VERSION(sem_init)
LOWBIT_FIRST_VERSION(sem_post)
LOWBIT_FIRST_VERSION(sem_timedwait)
LOWBIT_FIRST_VERSION(pthread_create)
LOWBIT_FIRST_VERSION(pthread_detach)
LOWBIT_FIRST_VERSION(pthread_join)
LOWBIT_FIRST_VERSION(pthread_once)
LOWBIT_FIRST_VERSION(pthread_key_create)
LOWBIT_FIRST_VERSION(pthread_key_delete)
LOWBIT_FIRST_VERSION(pthread_getspecific)
LOWBIT_FIRST_VERSION(pthread_setspecific)
LOWBIT_FIRST_VERSION(pthread_mutex_trylock)
LOWBIT_FIRST_VERSION(__pthread_key_create)

// Before 2.33 these were inline calls of functions that take the version of struct stat: 1 on x86-64.
extern "C" int __xstat(int version, const char* path, void* to);
extern "C" int __lxstat(int version, const char* path, void* to);
extern "C" int __fxstat(int version, int file, void* to);
extern "C" int __fxstat64(int version, int file, void* to);
extern "C" int __fxstatat(int version, int folder, const char* path, void* to, int flags);
extern "C" {
[[gnu::visibility("hidden")]] int stat(const char* path, void* to) { return __xstat(1, path, to); }
[[gnu::visibility("hidden")]] int lstat(const char* path, void* to) { return __lxstat(1, path, to); }
[[gnu::visibility("hidden")]] int fstat(int file, void* to) { return __fxstat(1, file, to); }
[[gnu::visibility("hidden")]] int fstat64(int file, void* to) { return __fxstat64(1, file, to); }
[[gnu::visibility("hidden")]] int fstatat(int folder, const char* path, void* to, int flags) {
  return __fxstatat(1, folder, path, to, flags);
}
}

// libstdc++ checks this to count references without atomics in a single-threaded process (glibc 2.32): here it may have
// more threads.
extern "C" [[gnu::visibility("hidden")]] char __libc_single_threaded;
char __libc_single_threaded = 0;

// For std::random_device (glibc 2.36), which is unused but linked in.
extern "C" int getentropy(void* buffer, unsigned long bytes);
extern "C" [[gnu::visibility("hidden")]] unsigned arc4random() {
  unsigned random;
  if (getentropy(&random, sizeof random) != 0) __builtin_trap();
  return random;
}
