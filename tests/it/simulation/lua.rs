//! The interpreter of the script: Lua 5.1, as in Redis, with the library `struct` and `redis.call` on the keys of a simulated server.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use mlua::{Function, Lua, MultiValue, Table, Value, Variadic};

use super::keys::{Keys, Reply, plain};

/// An interpreter, with the scripts that it has read. They work on `keys`.
pub struct Interpreter {
    lua: Lua,
    scripts: RefCell<BTreeMap<String, Function>>,
    pub keys: Rc<RefCell<Keys>>,
}

impl Interpreter {
    pub fn new() -> Self {
        let (lua, keys) = (Lua::new(), Rc::new(RefCell::new(Keys::default())));
        let redis = lua.create_table().expect("a table");
        for (name, raises) in [("call", true), ("pcall", false)] {
            let keys = Rc::clone(&keys);
            let call = lua.create_function(move |lua, arguments: Variadic<Value>| {
                let command: Vec<Vec<u8>> = arguments.iter().map(argument).collect();
                match keys.borrow_mut().run(&command) {
                    Reply::Error(error) if raises => Err(mlua::Error::runtime(error)),
                    reply => value(lua, reply),
                }
            });
            redis.set(name, call.expect("a function")).expect("it is set");
        }
        let globals = lua.globals();
        globals.set("redis", redis).expect("it is set");
        globals.set("struct", library(&lua).expect("a table")).expect("it is set");
        Self { lua, scripts: RefCell::default(), keys }
    }

    /// Reads a script.
    pub fn load(&self, sha1: &str, text: &str) {
        let read = || self.lua.load(text).set_name("script").into_function().expect("a script");
        self.scripts.borrow_mut().entry(sha1.to_owned()).or_insert_with(read);
    }

    pub fn flush(&self) {
        self.scripts.borrow_mut().clear();
    }

    /// Runs the script of that name; `None` if it was not read.
    ///
    /// # Errors
    /// An error that the script raises, which ours never does.
    pub fn run(&self, sha1: &str, keys: &[Vec<u8>], arguments: &[Vec<u8>]) -> Option<Result<Reply, String>> {
        let script = self.scripts.borrow().get(sha1)?.clone();
        let list = |texts: &[Vec<u8>]| {
            let texts = texts.iter().map(|text| self.lua.create_string(text).expect("a text"));
            self.lua.create_sequence_from(texts).expect("a list")
        };
        self.lua.globals().set("KEYS", list(keys)).expect("it is set");
        self.lua.globals().set("ARGV", list(arguments)).expect("it is set");
        Some(match script.call(()) {
            Ok(Value::String(text)) => Ok(Reply::Text(text.as_bytes().to_vec())),
            Ok(other) => Err(format!("the script returns {other:?}")),
            Err(error) => Err(format!("the script raises {error}")),
        })
    }
}

fn argument(value: &Value) -> Vec<u8> {
    match value {
        Value::String(text) => text.as_bytes().to_vec(),
        Value::Integer(number) => number.to_string().into_bytes(),
        Value::Number(number) => plain(*number).into_bytes(),
        other => panic!("{other:?} is no argument of a command"),
    }
}

/// A reply as Redis gives it to a script.
fn value(lua: &Lua, reply: Reply) -> mlua::Result<Value> {
    let entry = |name: &str, text: &str| {
        let table = lua.create_table()?;
        table.set(name, text)?;
        Ok(Value::Table(table))
    };
    match reply {
        Reply::Nothing => Ok(Value::Boolean(false)),
        Reply::Number(number) => Ok(Value::Integer(number)),
        Reply::Text(text) => lua.create_string(&text).map(Value::String),
        Reply::Status(status) => entry("ok", status),
        Reply::Error(error) => entry("err", &error),
        Reply::List(replies) => {
            let values: mlua::Result<Vec<Value>> = replies.into_iter().map(|reply| value(lua, reply)).collect();
            lua.create_sequence_from(values?).map(Value::Table)
        }
    }
}

/// Field that one letter of a format describes.
enum Field {
    Unsigned(usize),
    Signed(usize),
    Text,
}

fn fields(format: &str) -> Vec<Field> {
    let mut letters = format.strip_prefix('<').expect("little-endian").chars().peekable();
    let mut fields = Vec::new();
    while let Some(letter) = letters.next() {
        let size = letters.next_if(char::is_ascii_digit).map_or(4, |digit| digit as usize - '0' as usize);
        fields.push(match letter {
            'B' => Field::Unsigned(1),
            'I' => Field::Unsigned(size),
            'i' => Field::Signed(size),
            's' => Field::Text,
            other => panic!("struct has no {other} here"),
        });
    }
    fields
}

/// The part of the library `struct` that the script uses. Numbers are those of Lua 5.1, exact below 2^53.
fn library(lua: &Lua) -> mlua::Result<Table> {
    let library = lua.create_table()?;
    let pack = lua.create_function(|lua, (format, values): (String, Variadic<Value>)| {
        let mut packed = Vec::new();
        for (field, value) in fields(&format).iter().zip(values.iter()) {
            let number = || match value {
                Value::Integer(number) => *number,
                Value::Number(number) => plain(*number).parse().expect("a whole number"),
                other => panic!("{other:?} is no number"),
            };
            match field {
                Field::Unsigned(size) | Field::Signed(size) => {
                    packed.extend_from_slice(&number().to_le_bytes()[..*size]);
                }
                Field::Text => panic!("the script packs no text"),
            }
        }
        lua.create_string(&packed)
    })?;
    let unpack = lua.create_function(|lua, (format, packed, from): (String, mlua::LuaString, Option<usize>)| {
        let (packed, mut at, mut values) = (packed.as_bytes(), from.unwrap_or(1) - 1, MultiValue::new());
        for field in fields(&format) {
            values.push_back(match field {
                Field::Unsigned(size) => {
                    let mut bytes = [0; 8];
                    bytes[..size].copy_from_slice(&packed[at..at + size]);
                    at += size;
                    number(i64::from_le_bytes(bytes))
                }
                Field::Signed(size) => {
                    assert_eq!(size, 8, "of a signed number");
                    at += size;
                    number(i64::from_le_bytes(packed[at - 8..at].try_into().expect("eight bytes")))
                }
                Field::Text => {
                    let length = packed[at..].iter().position(|byte| *byte == 0).expect("its end");
                    at += length + 1;
                    Value::String(lua.create_string(&packed[at - length - 1..at - 1])?)
                }
            });
        }
        values.push_back(Value::Integer(i64::try_from(at + 1).expect("it fits")));
        Ok(values)
    })?;
    library.set("pack", pack)?;
    library.set("unpack", unpack)?;
    Ok(library)
}

/// A number of Lua 5.1, which has no others.
fn number(integer: i64) -> Value {
    #[expect(clippy::cast_precision_loss, reason = "as in Lua 5.1")]
    Value::Number(integer as f64)
}
