// SPDX-License-Identifier: Apache-2.0
// For wheels (LOWBIT_OLD_GLIBC): functions that the linker would bind to a new version of glibc, bound to the first
// version of the processor, so that a library built here also loads on glibc 2.28 (manylinux_2_28). Hidden definitions precede
// those of glibc for everything linked in, the static libstdc++ too. The functions are the same: glibc 2.29 removed
// error handling from exp..pow, and 2.34 moved the others from libpthread and libdl.
#if defined(__x86_64__)
#define LOWBIT_FIRST_GLIBC "2.2.5"
#define LOWBIT_GLIBC_OF_DLINFO "2.3.3"
#define LOWBIT_STAT_VERSION 1
#define LOWBIT_JUMP(name) "jmp *" name "@GOTPCREL(%rip)"
#elif defined(__aarch64__)
#define LOWBIT_FIRST_GLIBC "2.17"
#define LOWBIT_GLIBC_OF_DLINFO "2.17"
#define LOWBIT_STAT_VERSION 0
#define LOWBIT_JUMP(name) "adrp x16, :got:" name "\n ldr x16, [x16, :got_lo12:" name "]\n br x16"
#else
#error "LOWBIT_OLD_GLIBC is for x86-64 and 64-bit Arm"
#endif

#define LOWBIT_FIRST_VERSION(name) LOWBIT_FIRST_VERSION_OF(LOWBIT_FIRST_GLIBC, name)
#define LOWBIT_FIRST_VERSION_OF(version, name) \
  __asm__(".symver first_" #name "," #name "@GLIBC_" version "\n" \
          ".pushsection .text\n" \
          ".globl " #name "\n.hidden " #name "\n.type " #name ",%function\n" \
          #name ": " LOWBIT_JUMP("first_" #name) "\n" \
          ".popsection\n");

LOWBIT_FIRST_VERSION(exp)
LOWBIT_FIRST_VERSION(log)
LOWBIT_FIRST_VERSION(pow)
LOWBIT_FIRST_VERSION(exp2)
LOWBIT_FIRST_VERSION(log2)
LOWBIT_FIRST_VERSION(dladdr)
LOWBIT_FIRST_VERSION(dlclose)
LOWBIT_FIRST_VERSION(dlerror)
LOWBIT_FIRST_VERSION_OF(LOWBIT_GLIBC_OF_DLINFO, dlinfo)
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

// Before 2.33 these were inline calls of functions that take the version of struct stat.
extern "C" int __xstat(int version, const char* path, void* to);
extern "C" int __lxstat(int version, const char* path, void* to);
extern "C" int __fxstat(int version, int file, void* to);
extern "C" int __fxstat64(int version, int file, void* to);
extern "C" int __fxstatat(int version, int folder, const char* path, void* to, int flags);
extern "C" {
[[gnu::visibility("hidden")]] int stat(const char* path, void* to) { return __xstat(LOWBIT_STAT_VERSION, path, to); }
[[gnu::visibility("hidden")]] int lstat(const char* path, void* to) { return __lxstat(LOWBIT_STAT_VERSION, path, to); }
[[gnu::visibility("hidden")]] int fstat(int file, void* to) { return __fxstat(LOWBIT_STAT_VERSION, file, to); }
[[gnu::visibility("hidden")]] int fstat64(int file, void* to) { return __fxstat64(LOWBIT_STAT_VERSION, file, to); }
[[gnu::visibility("hidden")]] int fstatat(int folder, const char* path, void* to, int flags) {
  return __fxstatat(LOWBIT_STAT_VERSION, folder, path, to, flags);
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
