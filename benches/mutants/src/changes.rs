//! Finds the places of a Rust file that can be changed, and the text that chooses a change at run time.

use std::ops::Range;

use proc_macro2::Span;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{BinOp, Expr, Lit, Stmt, UnOp};

/// One change of behaviour.
pub struct Change {
    /// Function, text of the place and replacement, as people read it.
    pub what: String,
    /// Line in the file.
    pub line: usize,
}

/// A text for a range of the original; parts with a number are dropped with their change.
pub struct Edit {
    pub range: Range<usize>,
    /// Suffixes stand before infixes, and those before prefixes.
    pub rank: u8,
    pub parts: Vec<(Option<usize>, String)>,
}

/// A place with its changes and the edits that offer them.
pub struct Site {
    pub numbers: Vec<usize>,
    pub edits: Vec<Edit>,
}

/// Changes and places of all files read so far.
#[derive(Default)]
pub struct Found {
    pub changes: Vec<Change>,
    pub sites: Vec<Site>,
    /// Number of the first of `changes`.
    pub first: usize,
    text: String,
    function: Vec<String>,
}

/// Methods and what is called in their place; the second form is an operator.
const METHODS: [(&str, &str); 12] = [
    ("min", "l.max(r)"),
    ("max", "l.min(r)"),
    ("min_by_key", "l.max_by_key(r)"),
    ("max_by_key", "l.min_by_key(r)"),
    ("saturating_sub", "l.saturating_add(r)"),
    ("saturating_add", "l.saturating_sub(r)"),
    ("checked_sub", "l.checked_add(r)"),
    ("checked_add", "l.checked_sub(r)"),
    ("div_ceil", "l / r"),
    ("any", "l.all(r)"),
    ("all", "l.any(r)"),
    ("unwrap_or", "l.map_or(r, |_| r)"),
];
/// Methods without `is_` that return a condition.
const PREDICATES: [&str; 6] = ["contains", "contains_key", "starts_with", "ends_with", "eq", "swap"];
/// Traits whose implementations are no decisions.
const SKIPPED_TRAITS: [&str; 3] = ["Debug", "Display", "Error"];

impl Found {
    /// Finds the changes of a file; their numbers continue those found before.
    pub fn read(&mut self, text: &str) -> syn::Result<Vec<Site>> {
        self.text = text.to_owned();
        self.visit_file(&syn::parse_file(text)?);
        Ok(std::mem::take(&mut self.sites))
    }

    /// Adds a change of this place and returns its number.
    pub fn change(&mut self, place: &str, line: usize, new: &str) -> usize {
        let place = place.split_whitespace().collect::<Vec<_>>().join(" ");
        let shown: String = place.chars().take(90).collect();
        let function = self.function.join("::");
        self.changes.push(Change { what: format!("{function}: `{shown}` -> {new}"), line });
        self.first + self.changes.len() - 1
    }

    fn of(&self, span: Span) -> String {
        self.text[span.byte_range()].to_owned()
    }

    /// Offers `alternatives` (name, expression) for `range`, which is `before`, an operand, `(range, text)` and an operand, and
    /// `after` the original. Each alternative is an expression with the operands `l` and `r`.
    fn choice(&mut self, span: Span, alternatives: &[(&str, &str)], edits: Choice) {
        let place = self.of(span);
        let mut parts = vec![(None, edits.open.to_owned())];
        let mut numbers = Vec::new();
        for (name, expression) in alternatives {
            let number = self.change(&place, span.start().line, name);
            numbers.push(number);
            parts.push((Some(number), format!("if crate::mutants::is({number}) {{ {expression} }} else ")));
        }
        parts.push((None, edits.original.to_owned()));
        let range = span.byte_range();
        let mut all = Vec::new();
        if edits.is_prefix {
            all.push(Edit { range: range.start..range.start, rank: 2, parts });
            all.push(suffix(edits.tail, edits.close));
        } else {
            all.push(Edit { range: range.start..range.start, rank: 2, parts: vec![(None, edits.before.to_owned())] });
            all.extend(edits.infix.map(|(range, text)| Edit { range, rank: 1, parts: vec![(None, text.to_owned())] }));
            let rank = if edits.tail.is_empty() { 0 } else { 1 };
            all.push(Edit { range: edits.tail, rank, parts });
        }
        self.sites.push(Site { numbers, edits: all });
    }

    /// Offers expressions without operands instead of `span`.
    fn instead(&mut self, span: Span, alternatives: &[(&str, &str)]) {
        let end = span.byte_range().end;
        let edits =
            Choice { open: "(", original: "{ ", close: " })", is_prefix: true, tail: end..end, ..Choice::default() };
        self.choice(span, alternatives, edits);
    }

    /// Offers a text in front of `span` and one behind it, in which `#` is the number of the change.
    fn wrap(&mut self, span: Span, name: &str, before: &str, after: &str) {
        let number = self.change(&self.of(span), span.start().line, name);
        let is = format!("crate::mutants::is({number})");
        let range = span.byte_range();
        let prefix = Edit { range: range.start..range.start, rank: 2, parts: vec![(None, before.replace('#', &is))] };
        let suffix = suffix(range.end..range.end, after);
        self.sites.push(Site { numbers: vec![number], edits: vec![prefix, suffix] });
    }

    fn block(&mut self, attributes: &[syn::Attribute], signature: &syn::Signature, block: &syn::Block) {
        if !is_test(attributes) && signature.constness.is_none() {
            self.function.push(signature.ident.to_string());
            self.visit_block(block);
            self.function.pop();
        }
    }

    fn negate(&mut self, span: Span) {
        self.wrap(span, "negated", "(# != (", "))");
    }

    /// Negates a condition whose own parts are not changed.
    fn condition(&mut self, condition: &Expr) {
        match condition {
            Expr::Path(_) | Expr::Field(_) | Expr::Call(_) | Expr::Macro(_) | Expr::Await(_) => {
                self.negate(condition.span())
            }
            Expr::MethodCall(call)
                if !is_predicate(&call.method) && !METHODS.iter().any(|(name, _)| call.method == name) =>
            {
                self.negate(condition.span());
            }
            _ => {}
        }
    }

    fn binary(&mut self, binary: &syn::ExprBinary) {
        let alternatives: &[(&str, &str)] = match binary.op {
            BinOp::Lt(_) => &[("<=", "*l <= *r"), (">=", "*l >= *r")],
            BinOp::Le(_) => &[("<", "*l < *r"), (">", "*l > *r")],
            BinOp::Gt(_) => &[(">=", "*l >= *r"), ("<=", "*l <= *r")],
            BinOp::Ge(_) => &[(">", "*l > *r"), ("<", "*l < *r")],
            BinOp::Eq(_) => &[("!=", "*l != *r")],
            BinOp::Ne(_) => &[("==", "*l == *r")],
            BinOp::Add(_) => &[("-", "l - r")],
            BinOp::Sub(_) => &[("+", "l + r")],
            BinOp::Mul(_) => &[("/", "l / r")],
            BinOp::Div(_) => &[("*", "l * r"), ("div_ceil", "l.div_ceil(r)")],
            BinOp::Rem(_) => &[("/", "l / r")],
            BinOp::BitAnd(_) => &[("|", "l | r")],
            BinOp::BitOr(_) => &[("&", "l & r")],
            BinOp::Shl(_) => &[(">>", "l >> r")],
            BinOp::Shr(_) => &[("<<", "l << r")],
            BinOp::And(_) | BinOp::Or(_) => return self.lazy(binary),
            _ => return,
        };
        let is_compared = alternatives[0].1.starts_with('*');
        let (before, infix) = if is_compared { ("(match (&(", "), &(") } else { ("(match ((", "), (") };
        let operator = self.of(binary.op.span());
        let of = if is_compared { "*" } else { "" };
        let end = binary.span().byte_range().end;
        let original = format!("{{ {of}l {operator} {of}r }} }})");
        let between = binary.left.span().byte_range().end..binary.right.span().byte_range().start;
        let open = ")) { (l, r) => ";
        let infix = Some((between, infix));
        let edits = Choice { before, infix, open, original: &original, tail: end..end, ..Choice::default() };
        self.choice(binary.span(), alternatives, edits);
    }

    fn lazy(&mut self, binary: &syn::ExprBinary) {
        let is_and = matches!(binary.op, BinOp::And(_));
        if has_let(&binary.left) || has_let(&binary.right) {
            self.condition(&binary.left);
            return self.condition(&binary.right);
        }
        let number = self.change(&self.of(binary.span()), binary.span().start().line, if is_and { "||" } else { "&&" });
        let range = binary.span().byte_range();
        let comparison = if is_and { "!=" } else { "==" };
        let infix = format!("); if l {comparison} crate::mutants::is({number}) {{ (");
        let between = binary.left.span().byte_range().end..binary.right.span().byte_range().start;
        let edits = vec![
            Edit { range: range.start..range.start, rank: 2, parts: vec![(None, "({ let l = (".to_owned())] },
            Edit { range: between, rank: 1, parts: vec![(None, infix)] },
            suffix(range.end..range.end, ") } else { l } })"),
        ];
        self.sites.push(Site { numbers: vec![number], edits });
    }

    fn method(&mut self, call: &syn::ExprMethodCall) {
        let span = call.span();
        if is_predicate(&call.method) {
            return self.negate(span);
        }
        let Some((name, new)) = METHODS.iter().find(|(name, _)| call.method == name) else { return };
        if call.turbofish.is_some() || call.args.len() > 1 {
            return;
        }
        let receiver = call.receiver.span().byte_range().end;
        let end = span.byte_range().end;
        let (alternative, original, infix, tail, open) = match call.args.first() {
            None => {
                let (new, original) = (new.replace("(r)", "()"), format!("{{ l.{name}() }} }})"));
                (new, original, None, receiver..end, ")) { mut l => ")
            }
            Some(argument) => {
                let argument = argument.span().byte_range();
                let infix = Some((receiver..argument.start, "), ("));
                ((*new).to_owned(), format!("{{ l.{name}(r) }} }})"), infix, argument.end..end, ")) { (mut l, r) => ")
            }
        };
        let original = original.as_str();
        let edits = Choice { before: "(match ((", infix, open, original, tail, ..Choice::default() };
        let shown = if new.contains("map_or") { "always the default" } else { new };
        self.choice(span, &[(shown, &alternative)], edits);
    }
}

/// Texts of a choice between an original and its alternatives.
#[derive(Default)]
struct Choice<'a> {
    before: &'a str,
    infix: Option<(Range<usize>, &'a str)>,
    open: &'a str,
    original: &'a str,
    close: &'a str,
    is_prefix: bool,
    tail: Range<usize>,
}

fn suffix(range: Range<usize>, text: &str) -> Edit {
    Edit { range, rank: 0, parts: vec![(None, text.to_owned())] }
}

fn is_predicate(method: &syn::Ident) -> bool {
    let name = method.to_string();
    name.starts_with("is_") || PREDICATES.contains(&name.as_str())
}

fn has_let(expression: &Expr) -> bool {
    match expression {
        Expr::Let(_) => true,
        Expr::Binary(binary) => has_let(&binary.left) || has_let(&binary.right),
        _ => false,
    }
}

fn is_test(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let path = attribute.path();
        path.segments.last().is_some_and(|last| last.ident == "test")
            || path.is_ident("cfg") && attribute.parse_args::<syn::Ident>().is_ok_and(|name| name == "test")
    })
}

impl<'ast> Visit<'ast> for Found {
    fn visit_item_mod(&mut self, module: &'ast syn::ItemMod) {
        if !is_test(&module.attrs) {
            visit::visit_item_mod(self, module);
        }
    }

    fn visit_item_fn(&mut self, function: &'ast syn::ItemFn) {
        self.block(&function.attrs, &function.sig, &function.block);
    }

    fn visit_impl_item_fn(&mut self, function: &'ast syn::ImplItemFn) {
        self.block(&function.attrs, &function.sig, &function.block);
    }

    fn visit_trait_item_fn(&mut self, function: &'ast syn::TraitItemFn) {
        if let Some(block) = &function.default {
            self.block(&function.attrs, &function.sig, block);
        }
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        let of = item.trait_.as_ref().and_then(|(_, path, _)| path.segments.last());
        if !is_test(&item.attrs) && !of.is_some_and(|name| SKIPPED_TRAITS.iter().any(|skipped| name.ident == skipped)) {
            self.function.push(self.of(item.self_ty.span()));
            visit::visit_item_impl(self, item);
            self.function.pop();
        }
    }

    fn visit_item_const(&mut self, _: &'ast syn::ItemConst) {}
    fn visit_impl_item_const(&mut self, _: &'ast syn::ImplItemConst) {}
    fn visit_trait_item_const(&mut self, _: &'ast syn::TraitItemConst) {}
    fn visit_item_static(&mut self, _: &'ast syn::ItemStatic) {}
    fn visit_item_enum(&mut self, _: &'ast syn::ItemEnum) {}
    fn visit_expr_const(&mut self, _: &'ast syn::ExprConst) {}
    fn visit_pat(&mut self, _: &'ast syn::Pat) {}
    fn visit_type(&mut self, _: &'ast syn::Type) {}
    fn visit_attribute(&mut self, _: &'ast syn::Attribute) {}
    fn visit_generic_argument(&mut self, _: &'ast syn::GenericArgument) {}

    fn visit_expr_repeat(&mut self, repeat: &'ast syn::ExprRepeat) {
        self.visit_expr(&repeat.expr);
    }

    fn visit_expr_if(&mut self, branch: &'ast syn::ExprIf) {
        self.condition(&branch.cond);
        visit::visit_expr_if(self, branch);
    }

    fn visit_arm(&mut self, arm: &'ast syn::Arm) {
        if let Some((_, guard)) = &arm.guard
            && !has_let(guard)
        {
            self.wrap(guard.span(), "guard left out", "(# || (", "))");
            self.condition(guard);
        }
        visit::visit_arm(self, arm);
    }

    fn visit_stmt(&mut self, statement: &'ast Stmt) {
        if let Stmt::Expr(expression, Some(semicolon)) = statement {
            let is_offered = match expression {
                Expr::Call(call) => !matches!(&*call.func, Expr::Path(path) if path.path.is_ident("drop")),
                Expr::Binary(_) | Expr::MethodCall(_) | Expr::Assign(_) | Expr::Await(_) | Expr::Try(_) => true,
                Expr::Return(_) | Expr::Continue(_) => true,
                _ => false,
            };
            if is_offered {
                let span = expression.span().join(semicolon.span()).unwrap_or(expression.span());
                self.wrap(span, "left out", "if !# { ", " }");
            }
        }
        visit::visit_stmt(self, statement);
    }

    fn visit_expr(&mut self, expression: &'ast Expr) {
        match expression {
            Expr::Binary(binary) => self.binary(binary),
            Expr::MethodCall(call) => self.method(call),
            Expr::Unary(unary) if matches!(unary.op, UnOp::Not(_)) && !has_let(&unary.expr) => {
                self.negate(unary.span())
            }
            Expr::Call(call) if matches!(&*call.func, Expr::Path(path) if path.path.is_ident("Some")) => {
                self.instead(call.span(), &[("None", "None")]);
            }
            Expr::Lit(literal) => match &literal.lit {
                Lit::Bool(_) => self.negate(literal.span()),
                Lit::Int(number) => {
                    let value: u128 = number.base10_parse().unwrap_or_default();
                    let (more, suffix) = (value.saturating_add(1), number.suffix());
                    let more = format!("{more}{suffix}");
                    if value > 1 {
                        let less = format!("{}{suffix}", value - 1);
                        self.instead(literal.span(), &[(&more, &more), (&less, &less)]);
                    } else {
                        self.instead(literal.span(), &[(&more, &more)]);
                    }
                }
                _ => {}
            },
            _ => {}
        }
        visit::visit_expr(self, expression);
    }
}
