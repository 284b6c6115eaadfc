/*
 * test.h: the test runner's interface. TEST(suite, name) { ... } registers itself; test_main.c runs what
 * the command line selects ("suite" or "suite.name", all by default) and ends with a count. A failed
 * CHECK records file, line and text, and the test goes on; REQUIRE_TEST leaves the test.
 */
#ifndef FOLIO_TEST_H
#define FOLIO_TEST_H

#include <folio/folio.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef void (*test_fn)(void);
void test_register(const char *suite, const char *name, test_fn fn, bool long_only);
void test_fail(const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Failures of the running test so far. */
int test_failures(void);
/* This machine cannot run the test, and says why: it counts neither as passed nor as failed. */
void test_skip(const char *why);
/* True under --long: the tier of `make test-long`. */
bool test_is_long(void);

#define TEST_(suite, name, long_only)                                                              \
    static void test_##suite##_##name(void);                                                       \
    __attribute__((constructor)) static void register_##suite##_##name(void)                       \
    {                                                                                              \
        test_register(#suite, #name, test_##suite##_##name, long_only);                            \
    }                                                                                              \
    static void test_##suite##_##name(void)
#define TEST(suite, name) TEST_(suite, name, false)
/* Runs under --long only. */
#define LONG_TEST(suite, name) TEST_(suite, name, true)

#define CHECK(cond)                                                                                \
    do {                                                                                           \
        if (!(cond)) test_fail(__FILE__, __LINE__, "%s", #cond);                                   \
    } while (0)
#define CHECK_MSG(cond, ...)                                                                       \
    do {                                                                                           \
        if (!(cond)) test_fail(__FILE__, __LINE__, __VA_ARGS__);                                   \
    } while (0)
#define REQUIRE_TEST(cond)                                                                         \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            test_fail(__FILE__, __LINE__, "%s", #cond);                                            \
            return;                                                                                \
        }                                                                                          \
    } while (0)
#define CHECK_INT(actual, expected)                                                                \
    do {                                                                                           \
        long long a_ = (long long)(actual), e_ = (long long)(expected);                            \
        if (a_ != e_) test_fail(__FILE__, __LINE__, "%s is %lld, expected %lld", #actual, a_, e_); \
    } while (0)
/* The call succeeds; its sentence is shown if it does not. */
#define CHECK_OK(call)                                                                             \
    do {                                                                                           \
        folio_status s_ = (call);                                                                  \
        if (s_ != FOLIO_OK)                                                                        \
            test_fail(__FILE__, __LINE__, "%s: %s: %s", #call, folio_status_name(s_),              \
                      folio_last_error());                                                         \
    } while (0)
/* The call is refused with this status and a sentence that contains `words`. */
#define CHECK_REFUSED(call, status, words)                                                         \
    do {                                                                                           \
        folio_status s_ = (call);                                                                  \
        if (s_ != (status))                                                                        \
            test_fail(__FILE__, __LINE__, "%s: %s, expected %s", #call, folio_status_name(s_),     \
                      folio_status_name(status));                                                  \
        else if (strstr(folio_last_error(), (words)) == NULL)                                      \
            test_fail(__FILE__, __LINE__, "%s: \"%s\" lacks \"%s\"", #call, folio_last_error(),    \
                      (words));                                                                    \
    } while (0)

#endif
