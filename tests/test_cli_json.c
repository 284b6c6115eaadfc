/* test_cli_json.c: the program's JSON writer: what it writes is JSON, and strings survive. */
#include "test.h"

#include "json.h"

#include <math.h>
#include <stdlib.h>

/* The writer belongs to the program, which the tests do not link. */
#include "json.c"

static char text[4096];

static void start(json *j)
{
    *j = (json){.out = tmpfile()};
    text[0] = '\0';
}

static const char *finish(json *j)
{
    rewind(j->out);
    size_t n = fread(text, 1, sizeof text - 1, j->out);
    text[n] = '\0';
    fclose(j->out);
    return text;
}

TEST(cli_json, nesting)
{
    json j;
    start(&j);
    REQUIRE_TEST(j.out != NULL);
    json_object(&j, NULL);
    json_string(&j, "a", "b");
    json_array(&j, "list");
    json_integer(&j, NULL, -3);
    json_bool(&j, NULL, true);
    json_object(&j, NULL);
    json_close(&j);
    json_close(&j);
    json_array(&j, "empty");
    json_close(&j);
    json_number(&j, "x", 0.5);
    json_close(&j);
    const char *want = "{\n  \"a\": \"b\",\n  \"list\": [\n    -3,\n    true,\n    {}\n  ],\n"
                       "  \"empty\": [],\n  \"x\": 0.5\n}\n";
    CHECK_MSG(strcmp(finish(&j), want) == 0, "%s", text);
}

TEST(cli_json, strings)
{
    json j;
    start(&j);
    REQUIRE_TEST(j.out != NULL);
    json_string(&j, NULL, "q\" b\\ n\n t\t \x01 \xc3\xa9");
    CHECK_MSG(strcmp(finish(&j), "\"q\\\" b\\\\ n\\n t\\t \\u0001 \xc3\xa9\"") == 0, "%s", text);
}

TEST(cli_json, numbers)
{
    static const double values[] = {0, -1.5, 1e300, 2.5e-7, 123456789};
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
        json j;
        start(&j);
        REQUIRE_TEST(j.out != NULL);
        json_number(&j, NULL, values[i]);
        CHECK_MSG(strtod(finish(&j), NULL) == values[i], "%s", text);
    }
    static const double none[] = {(double)INFINITY, -(double)INFINITY, (double)NAN};
    for (size_t i = 0; i < 3; i++) {
        json j;
        start(&j);
        REQUIRE_TEST(j.out != NULL);
        json_number(&j, NULL, none[i]);
        CHECK_MSG(strcmp(finish(&j), "null") == 0, "%s", text);
    }
}
